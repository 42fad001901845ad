"""Every published model has exactly the parameters of its release (totals: transformers on the meta device, untied, without MTP)."""

from __future__ import annotations

import pytest

from moe_train.config.compose import compose, group_options
from moe_train.model.count import count_parameters

TOTALS = {
    "deepseek_v3": (671_026_404_352, 14_848),
    "deepseek_v2": (235_741_434_880, 0),
    "deepseek_v2_lite": (15_706_484_224, 0),
    "moonlight_16b_a3b": (15_960_108_544, 1_664),
    "kimi_k2": (1_026_408_209_408, 23_040),
    "qwen3_30b_a3b": (30_532_122_624, 0),
    "qwen3_235b_a22b": (235_093_634_560, 0),
    "glm_4_5": (352_797_814_784, 14_240),
    "glm_4_5_air": (106_852_245_504, 5_760),
    "olmoe_1b_7b": (6_919_161_856, 0),
    "mixtral_8x7b": (46_702_792_704, 0),
    "gpt_oss_20b": (20_914_757_184, 0),
    "gpt_oss_120b": (116_829_156_672, 0),
}
"""Trainable parameters, and entries of the selection-bias buffers."""
ACTIVE = {
    # DeepSeek-V3's and Moonlight's published arithmetic counts the selection bias too (the second number of TOTALS).
    "deepseek_v3": 37_552_297_472 - 14_848,
    "deepseek_v2_lite": 2_661_150_208,
    "moonlight_16b_a3b": 2_914_776_192 - 1_664,
    "qwen3_30b_a3b": 3_353_032_704,
    "qwen3_235b_a22b": 22_190_763_520,
    "olmoe_1b_7b": 1_282_017_280,
    "mixtral_8x7b": 12_879_925_248,
    "gpt_oss_20b": 4_187_440_704,
    "gpt_oss_120b": 5_711_982_912,
}


def test_every_model_has_its_number() -> None:
    assert set(group_options("model")) == {*TOTALS, "tiny_mla_moe"}


@pytest.mark.parametrize("name", sorted(TOTALS))
def test_parameters_equal_the_release(name: str) -> None:
    count = count_parameters(compose([f"model={name}"]).model)
    assert (count.total, count.selection_bias) == TOTALS[name]
    assert sum(count.by_part.values()) == count.total
    assert sum(count.active_by_part.values()) == count.active
    if name in ACTIVE:
        assert count.active == ACTIVE[name]


def test_deepseek_v3_with_its_mtp_module() -> None:
    """11.6B of its own; the released checkpoint stores copies of embedding and head beside it (DeepSeek-V3's README: 11.5B + 1.8B)."""
    model = compose(["model=deepseek_v3", "model.mtp.depth=1"]).model
    mtp = count_parameters(model).by_part["mtp"]
    assert round(mtp / 1e9, 1) == 11.6
