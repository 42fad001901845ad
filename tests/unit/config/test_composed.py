"""conf/composed holds what each experiment means now."""

from __future__ import annotations

from moe_train.config.compose import compose, group_options
from moe_train.config.composed import stale


def test_composed_files_are_fresh() -> None:
    assert not stale(), "run: python -m moe_train.config.composed --write"


def test_every_choice_of_every_group_composes() -> None:
    special = {"data": {"indexed": ["data.paths=[x]"]}}
    for group in ("balance", "optim", "data", "parallel", "train"):
        for choice in group_options(group):
            compose([f"{group}={choice}", *special.get(group, {}).get(choice, [])])


def test_smoke_is_the_fixed_point_of_the_equality_tests() -> None:
    config = compose(["+experiment=smoke"])
    assert (config.train.steps, config.train.global_batch, config.data.seq_len) == (8, 16, 64)
    assert (config.train.precision, config.train.deterministic, config.balance.bias) == ("fp32", True, "sign")
    assert config.model.ffn_kinds()[:2] == ["dense", "moe"]
    assert (config.model.attention.kind, config.model.moe.num_shared_experts, config.model.mtp.depth) == ("mla", 1, 1)
