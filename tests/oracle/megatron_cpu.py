"""megatron-core as a judge: `python megatron_cpu.py FOLDER` trains nothing, it answers.

For every FOLDER/NAME.json (settings of a megatron config) with FOLDER/NAME.safetensors (weights under megatron's names, `tokens` and
`labels` int64 [M, B, T]) it builds megatron's GPT model, runs forward and backward on the M micro-batches, updates the expert biases as
megatron's optimizer step does, and writes FOLDER/NAME.answer.safetensors: `loss [M]` (mean over the tokens of each micro-batch),
`gradient.NAME`, `bias.NAME`, the balancing losses as `tracked.NAME` [layers] and those of MTP as `tracked.mtp` [depths].

megatron-core takes a CUDA device for granted. The few calls it makes on one are turned to the CPU here, for this process alone; what
computes is megatron's own, but for the core attention of MLA, which it takes from Transformer Engine.
"""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

SEED = 1


class OnCPU(TorchFunctionMode):
    """A request for a CUDA device becomes one for the CPU."""

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = dict(kwargs or {})
        if "cuda" in str(kwargs.get("device")):
            kwargs["device"] = "cpu"
        return func(*args, **kwargs)


def point_cuda_at_the_cpu() -> None:
    torch.cuda.current_device = lambda: "cpu"
    torch.cuda.get_rng_state = torch.cuda.random.get_rng_state = lambda *args, **kwargs: torch.get_rng_state()
    torch.cuda.manual_seed = torch.manual_seed
    torch.Tensor.cuda = lambda self, *args, **kwargs: self
    torch.nn.Module.cuda = lambda self, *args, **kwargs: self
    OnCPU().__enter__()  # for the life of this process


def prepare_megatron() -> None:
    """Its random state on the CPU, and the names of Transformer Engine that it looks up although it does without them."""
    from megatron.core.tensor_parallel import random
    from megatron.core.transformer import multi_latent_attention
    from megatron.core.transformer.moe import moe_utils

    multi_latent_attention.TELinear = type("TELinear", (nn.Module,), {})
    moe_utils.te_general_gemm = None
    random._set_cuda_rng_state = lambda state, *args, **kwargs: torch.set_rng_state(state)


class CausalAttention(nn.Module):
    """Core attention of MLA: softmax(q kᵀ · scale) v over the tokens before. query, key [T, B, H, C], value [T, B, H, V] -> [T, B, H·V]."""

    def __init__(self, *args: Any, softmax_scale: float, **kwargs: Any) -> None:
        super().__init__()
        self.scale = softmax_scale

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        logits_BHTS = torch.einsum("tbhc,sbhc->bhts", query, key) * self.scale
        future_TS = torch.ones(logits_BHTS.shape[-2:], dtype=torch.bool).triu(1)
        weights_BHTS = logits_BHTS.masked_fill(future_TS, -torch.inf).softmax(-1)
        return torch.einsum("bhts,sbhv->tbhv", weights_BHTS, value).flatten(2)


def build(settings: dict[str, Any], vocab_size: int, length: int) -> nn.Module:
    """megatron's GPTModel without Transformer Engine."""
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_mtp_block_spec
    from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

    common = {
        "use_cpu_initialization": True,
        "params_dtype": torch.float32,
        "normalization": "RMSNorm",
        "gated_linear_unit": True,
        "activation_func": nn.functional.silu,
        "add_bias_linear": False,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
    } | dict.fromkeys(("bias_activation_fusion", "masked_softmax_fusion", "gradient_accumulation_fusion", "apply_rope_fusion"), False)
    model_keys = {key: settings.pop(key) for key in ("rotary_percent", "rotary_base") if key in settings and "q_lora_rank" not in settings}
    use_mla = "q_lora_rank" in settings
    config = (MLATransformerConfig if use_mla else TransformerConfig)(**common, **settings, multi_latent_attention=use_mla)
    spec = get_gpt_decoder_block_spec(config, use_transformer_engine=False)
    if use_mla:
        for layer in spec.layer_specs:
            layer.submodules.self_attention.submodules.core_attention = CausalAttention
    mtp = get_gpt_mtp_block_spec(config, spec, use_transformer_engine=False) if config.mtp_num_layers else None
    return GPTModel(config, spec, vocab_size, length, position_embedding_type="rope", mtp_block_spec=mtp, **model_keys).train()


def answer(settings: dict[str, Any], given: dict[str, Tensor]) -> dict[str, Tensor]:
    from megatron.core.distributed.finalize_model_grads import _update_router_expert_bias
    from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler, get_moe_layer_wise_logging_tracker
    from megatron.core.transformer.multi_token_prediction import MTPLossAutoScaler, MTPLossLoggingHelper

    tokens_MBT, labels_MBT = given.pop("tokens"), given.pop("labels")
    num_micro, _, length = tokens_MBT.shape
    model = build(settings, given["embedding.word_embeddings.weight"].shape[0], length)
    loaded = model.load_state_dict(given, strict=False)
    missing = [name for name in loaded.missing_keys if not name.endswith("_extra_state")]
    assert not missing, missing
    assert not loaded.unexpected_keys, loaded.unexpected_keys
    # As megatron's schedule does: every micro-batch weighs the same.
    MoEAuxLossAutoScaler.set_loss_scale(torch.tensor(1 / num_micro))
    MTPLossAutoScaler.set_loss_scale(torch.tensor(1 / num_micro))
    trackers = {"mtp": MTPLossLoggingHelper.tracker, "moe": get_moe_layer_wise_logging_tracker()}
    for tracker in trackers.values():
        tracker.clear()
    losses = []
    for tokens_BT, labels_BT in zip(tokens_MBT, labels_MBT, strict=True):
        positions_BT = torch.arange(length).expand_as(tokens_BT)
        loss = model(tokens_BT, positions_BT, None, labels=labels_BT).mean()
        (loss / num_micro).backward()
        losses.append(loss.detach())
    found = {"loss": torch.stack(losses)}
    found |= {f"gradient.{name}": parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    found |= {f"tracked.{name}": entry["values"] for name, entry in trackers["moe"].items()}
    if "values" in trackers["mtp"]:
        found["tracked.mtp"] = trackers["mtp"]["values"]
    if model.config.moe_router_enable_expert_bias:
        _update_router_expert_bias([model], model.config)
        found |= {f"bias.{name}": buffer for name, buffer in model.named_buffers() if name.endswith("expert_bias")}
    return found


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    point_cuda_at_the_cpu()
    prepare_megatron()
    from megatron.core import parallel_state, tensor_parallel

    parallel_state.initialize_model_parallel()
    tensor_parallel.model_parallel_cuda_manual_seed(SEED)
    for path in sorted(folder.glob("*.json")):
        given = load_file(path.with_suffix(".safetensors"))
        found = answer(json.loads(path.read_text()), given)
        save_file({name: tensor.contiguous() for name, tensor in found.items()}, path.with_suffix(".answer.safetensors"))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
