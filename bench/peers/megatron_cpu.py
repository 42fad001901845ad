"""What megatron-core needs to run on a CPU, where it takes a CUDA device for granted: for this process, device calls of torch answer for
the CPU.

For measurements only. megatron-core's own code computes everything except three pieces that live in Transformer Engine or Apex: the norm
(torch.nn.RMSNorm), MLA's core attention (PyTorch's fused attention), and the grouped matmul of experts (its sequential experts instead).
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode


class _Cuda:
    """Streams and events of a device that does everything in order."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **kwargs: _Cuda()


class _CudaMeansCpu(TorchFunctionMode):
    """Every tensor asked for on a CUDA device is made on the CPU."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        device = kwargs.get("device")
        if isinstance(device, int) or "cuda" in str(device):
            kwargs["device"] = "cpu"
        if func is torch.Tensor.to:
            args = tuple("cpu" if isinstance(a, str | torch.device) and "cuda" in str(a) else a for a in args)
        return func(*args, **kwargs)


class FusedAttention(torch.nn.Module):
    """Causal core attention for MLA. query, key, value [T, B, H, …] -> [T, B, H·V]."""

    def __init__(self, config: Any, *args: Any, softmax_scale: float | None = None, **kwargs: Any) -> None:
        super().__init__()
        self.scale = softmax_scale

    def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        q, k, v = (x.permute(1, 2, 0, 3) for x in (query, key, value))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=self.scale).permute(2, 0, 1, 3).flatten(2)


def _patch_torch() -> None:
    cuda = torch.cuda
    answers: dict[str, Any] = {
        "current_device": lambda: "cpu",
        "device_count": lambda: 1,
        "synchronize": lambda *args: None,
        "manual_seed": torch.manual_seed,
        "get_rng_state": lambda *args: torch.get_rng_state(),
        "set_rng_state": lambda state, *args: torch.set_rng_state(state),
        "current_stream": lambda *args: _Cuda(),
        "default_stream": lambda *args: _Cuda(),
        "stream": lambda stream: contextlib.nullcontext(),
        "Stream": _Cuda,
        "Event": _Cuda,
    }
    for name, answer in answers.items():
        setattr(cuda, name, answer)
    cuda.default_generators = (torch.default_generator,)
    cuda.nvtx.range_push = cuda.nvtx.range_pop = lambda *args: None
    torch.Tensor.cuda = lambda self, *args, **kwargs: self  # type: ignore[method-assign]
    torch.Tensor.record_stream = lambda self, stream: None  # type: ignore[method-assign]
    _CudaMeansCpu().__enter__()  # for the life of the process


def _patch_megatron() -> None:
    from megatron.core.models import backends
    from megatron.core.models.gpt import gpt_layer_specs
    from megatron.core.tensor_parallel import mappings, random
    from megatron.core.transformer import multi_latent_attention, torch_norm, transformer_block
    from megatron.core.transformer.moe import moe_utils

    class Norm:
        def __new__(cls, config: Any, hidden_size: int, eps: float = 1e-5, **kwargs: Any) -> torch.nn.RMSNorm:
            return torch.nn.RMSNorm(hidden_size, eps=eps, dtype=config.params_dtype)

    for module in (backends, gpt_layer_specs, torch_norm, transformer_block):
        for name in ("WrappedTorchNorm", "LNImpl", "LayerNormImpl"):
            if hasattr(module, name):
                setattr(module, name, Norm)
    random._get_cuda_rng_state = lambda *args, **kwargs: torch.get_rng_state()
    random._set_cuda_rng_state = lambda state, *args, **kwargs: torch.set_rng_state(state)
    if not isinstance(getattr(multi_latent_attention, "TELinear", None), type):
        multi_latent_attention.TELinear = type("TELinear", (torch.nn.Module,), {})
    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None
    forward = mappings._AllToAll.forward

    def all_to_all(ctx: Any, group: Any, x: torch.Tensor, output_sizes: Any, input_sizes: Any) -> torch.Tensor:
        lists = (sizes.tolist() if hasattr(sizes, "tolist") else sizes for sizes in (output_sizes, input_sizes))
        return forward(ctx, group, x, *lists)

    mappings._AllToAll.forward = staticmethod(all_to_all)


def install() -> None:
    """Patch torch and megatron-core in this process."""
    _patch_torch()
    _patch_megatron()
