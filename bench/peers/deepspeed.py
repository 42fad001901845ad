"""DeepSpeed's MoE layer in the place of the MoE layer of transformers' model (DeepSpeed has no model of its own).

variant "": capacity factor 1.25, its usual setting, which drops the tokens that do not fit; "dropless": drop_tokens=False, which pads
every expert to the fullest one.
"""

from __future__ import annotations

import os

import torch
from torch import nn
from torch.nn import functional as F

from bench.peers import transformers as host
from bench.peers.serve import Loss, main
from bench.shapes import Shape


class _Expert(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate_up = nn.Linear(shape.hidden, 2 * shape.expert_ffn, bias=False)
        self.down = nn.Linear(shape.expert_ffn, shape.hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down(F.silu(gate) * up)


class _Layer(nn.Module):
    """DeepSpeed's layer, with its balancing loss left out as in all participants, plus the host's shared experts."""

    def __init__(self, shape: Shape, dropless: bool, shared: nn.Module | None) -> None:
        super().__init__()
        from deepspeed.moe.layer import MoE

        self.moe = MoE(
            shape.hidden, _Expert(shape), shape.experts, k=shape.top_k, capacity_factor=1.25, drop_tokens=not dropless, use_rts=False
        )
        self.moe.set_deepspeed_parallelism()
        self.shared = shared

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.moe(x)[0]
        return y if self.shared is None else y + self.shared(x)


def build(shape: Shape, dtype: torch.dtype, variant: str, compiled: bool) -> tuple[nn.Module, Loss]:
    if compiled:
        raise SystemExit("DeepSpeed's MoE layer is not compiled here")
    os.environ.update(DS_ACCELERATOR="cpu", DS_BUILD_OPS="0")
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    import deepspeed

    deepspeed.comm.init_distributed("gloo", verbose=False)
    model, loss_of = host.build(shape, dtype, "eager", False)
    for layer in model.model.layers:
        if hasattr(layer.mlp, "experts"):
            shared = getattr(layer.mlp, "shared_experts", None)
            # The gate stays fp32: DeepSpeed computes it in fp32.
            layer.mlp = _Layer(shape, variant == "dropless", shared).to(dtype)
    return model, loss_of


if __name__ == "__main__":
    main(build)
