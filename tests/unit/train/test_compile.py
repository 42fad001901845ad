"""train.compile compiles each block and trains the same model."""

from __future__ import annotations

import shutil

import pytest
import torch

from moe_train.config import AttentionConfig, Config, ModelConfig, MoEConfig, OptimConfig, TrainConfig
from moe_train.model.batch import Batch
from moe_train.model.transformer import Transformer
from moe_train.optim import build_optimizer
from moe_train.train.device import compile_blocks
from moe_train.train.precision import Weights
from moe_train.train.step import TrainStep


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None and shutil.which("clang++") is None, reason="torch.compile on a CPU needs a C++ compiler")
def test_compiled_blocks_train_the_same_model() -> None:
    attention = AttentionConfig(kind="gqa", num_heads=2, num_kv_heads=1, head_dim=8)
    model_config = ModelConfig(vocab_size=32, hidden_size=16, num_layers=2, attention=attention, moe=MoEConfig(4, 2, 8))
    config = Config(model=model_config, optim=OptimConfig(lr=0.01), train=TrainConfig(steps=4, global_batch=4, micro_batch=2))
    batch = Batch.from_tokens(torch.randint(0, 32, (4, 16)))
    results = []
    for compiled in (False, True):
        model = Transformer(model_config)
        model.init_weights(0)
        names = [name for name, _ in model.named_parameters()]
        weights = Weights(model, "fp32")
        step = TrainStep(model, weights, build_optimizer(model, weights.master, config.optim), config, torch.device("cpu"))
        if compiled:
            torch._dynamo.utils.counters.clear()
            compile_blocks(model)
            assert names == [name for name, _ in model.named_parameters()], "names in checkpoints must not change"
        results.append([(r.loss, r.grad_norm) for r in (step(batch, s) for s in range(3))])
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0
    for eager, compiled in zip(*results, strict=True):
        assert compiled == pytest.approx(eager, rel=2e-5)
