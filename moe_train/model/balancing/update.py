"""The bias update, once per optimizer step over all tokens of the step (law 5)."""

from __future__ import annotations

import torch
from torch import nn

from moe_train.config import BalanceConfig
from moe_train.model.balancing.quantile import quantile_update
from moe_train.model.balancing.sign_bias import sign_update
from moe_train.model.batch import Recorder


@torch.no_grad()
def update_biases(model: nn.Module, recorder: Recorder, config: BalanceConfig) -> None:
    """Move the selection bias of every MoE layer by the rule in `config.bias`; a layer that saw no token is left alone."""
    from moe_train.model.moe.router import Router

    if config.bias == "none":
        return
    for router in (module for module in model.modules() if isinstance(module, Router)):
        load_E = recorder.load.get(router.layer)
        if load_E is None or not bool(load_E.any()):
            continue
        if config.bias == "sign":
            new_E = sign_update(router.selection_bias, load_E, config.bias_rate)
        else:
            new_E = quantile_update(router.selection_bias, recorder.required_bias[router.layer], router.top_k)
        router.selection_bias.copy_(new_E)
