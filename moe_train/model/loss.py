"""Summed next-token cross-entropy. The caller divides by the token count of the global batch (law: one denominator).

The logits of a large vocabulary are the largest tensor of a training step. They are made for a few tokens at a time, and their gradient,
softmax(logits) − onehot(label), is used at once for the gradients of the hidden state and the head; so no more than one chunk of them
ever exists.

Shapes: N tokens, C tokens of a chunk, D hidden, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from moe_train.model.batch import IGNORE
from moe_train.model.linear import product, product_out

CHUNK = 512
"""Tokens whose logits exist at once. With 8,192 words they are 16 MB in fp32 and stay in the last cache."""


def cross_entropy_sum(hidden_ND: Tensor, weight_VD: Tensor, labels_N: Tensor) -> Tensor:
    """Σ over labelled tokens of −log softmax(hidden · weightᵀ)[label], fp32 scalar. labels_N int64, IGNORE where there is none."""
    if not torch.is_grad_enabled():
        # Inside the function requires_grad would still ask for gradients that nobody takes: evaluation would pay three products for one.
        hidden_ND, weight_VD = hidden_ND.detach(), weight_VD.detach()
    return _CrossEntropySum.apply(hidden_ND, weight_VD, labels_N)


def _loss_and_softmax(logits_CV: Tensor, labels_C: Tensor) -> tuple[Tensor, Tensor]:
    """Summed loss of the labelled tokens, and the log-probabilities fp32 [C, V]."""
    log_probs_CV = torch.log_softmax(logits_CV.float(), dim=-1)
    valid_C = labels_C != IGNORE
    picked_C = log_probs_CV.gather(1, labels_C.clamp(min=0).unsqueeze(1)).squeeze(1)
    return -torch.where(valid_C, picked_C, 0).sum(), log_probs_CV


class _CrossEntropySum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden_ND: Tensor, weight_VD: Tensor, labels_N: Tensor) -> Tensor:
        needs_hidden, needs_weight = ctx.needs_input_grad[:2]
        grad_hidden = torch.empty_like(hidden_ND, memory_format=torch.contiguous_format) if needs_hidden else None
        # Chunks are summed in fp32 whatever the model's precision.
        grad_weight = torch.zeros_like(weight_VD, dtype=torch.float32) if needs_weight else None
        total = hidden_ND.new_zeros((), dtype=torch.float32)
        for start in range(0, hidden_ND.shape[0], CHUNK):
            rows = slice(start, start + CHUNK)
            hidden_CD, labels_C = hidden_ND[rows], labels_N[rows]
            loss, log_probs_CV = _loss_and_softmax(product(hidden_CD, weight_VD), labels_C)
            total += loss
            if grad_hidden is None and grad_weight is None:
                continue
            grad_CV = log_probs_CV.exp_()
            valid_C1 = (labels_C != IGNORE).unsqueeze(1)
            grad_CV.scatter_add_(1, labels_C.clamp(min=0).unsqueeze(1), -valid_C1.float())
            grad_CV = grad_CV.mul_(valid_C1).to(hidden_ND.dtype)
            if grad_hidden is not None:
                product_out(grad_CV, weight_VD.t(), grad_hidden[rows])
            if grad_weight is not None:
                grad_weight += product(grad_CV.t(), hidden_CD.t())
        ctx.save_for_backward(grad_hidden, None if grad_weight is None else grad_weight.to(weight_VD.dtype))
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return *(None if saved is None else (saved * grad).to(saved.dtype) for saved in ctx.saved_tensors), None
