"""Run code written for fp32 in fp64: inside, every request for fp32 is one for fp64. So two programs that mean the same agree to 1e-12,
and what is left in fp32 is rounding alone."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

import torch


@contextmanager
def double_precision() -> Iterator[None]:
    """torch.float32, torch.float and Tensor.float mean fp64, and new tensors are fp64."""
    before, double = torch.get_default_dtype(), torch.float64
    torch.set_default_dtype(double)
    try:
        with patch.multiple(torch, float32=double, float=double), patch.object(torch.Tensor, "float", torch.Tensor.double):
            yield
    finally:
        torch.set_default_dtype(before)
