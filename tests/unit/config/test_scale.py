"""One dial: model.scale."""

from __future__ import annotations

from dataclasses import asdict

import pytest

from moe_train.config import ConfigError
from moe_train.config.compose import compose, compose_untyped
from moe_train.model.count import count_parameters


def test_width_depth_and_experts_grow_together() -> None:
    one, two = compose(["model=tiny_mla_moe"]).model, compose(["model=tiny_mla_moe", "model.scale=2"]).model
    for key in ("hidden_size", "num_layers", "ffn_hidden_size"):
        assert getattr(two, key) == 2 * getattr(one, key)
    assert two.moe.num_experts == 2 * one.moe.num_experts
    assert two.attention.num_heads == 2 * one.attention.num_heads
    assert two.attention.kv_lora_rank == 2 * one.attention.kv_lora_rank
    assert two.attention.qk_nope_head_dim == one.attention.qk_nope_head_dim
    assert (two.moe.top_k, two.first_dense_layers, two.vocab_size) == (one.moe.top_k, one.first_dense_layers, one.vocab_size)
    assert two.scale == 2


@pytest.mark.parametrize("scale", [2, 3, 8])
def test_scaled_models_can_be_built(scale: int) -> None:
    small, large = (count_parameters(compose([f"model.scale={n}"]).model) for n in (1, scale))
    assert large.by_part["routed_experts"] > scale**4 * small.by_part["routed_experts"]


def test_the_config_shown_is_not_scaled_and_the_config_run_is() -> None:
    shown = compose_untyped(["model.scale=2"]).model
    run = compose(["model.scale=2"]).model
    assert (shown.hidden_size, shown.scale) == (run.hidden_size // 2, 2)


def test_reading_a_written_config_does_not_scale_again(tmp_path) -> None:
    from moe_train.train.run_dir import config_yaml, read_config

    config = compose(["model.scale=2"])
    (tmp_path / "config.yaml").write_bytes(config_yaml(config))
    assert asdict(read_config(tmp_path / "config.yaml")) == asdict(config)


@pytest.mark.parametrize(
    ("overrides", "text"), [(["model=deepseek_v3", "model.scale=2"], "tiny_mla_moe alone"), (["model.scale=0"], "1 … 32")]
)
def test_bad_dials(overrides: list[str], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        compose(overrides)
