"""What the load of a step looks like. MaxVio = max_i load_i / mean − 1 (arXiv:2408.15664 eq. 5): 0 is balance."""

from __future__ import annotations

import math

from torch import Tensor


def load_metrics(load: dict[int, Tensor]) -> dict[str, float | list[float]]:
    """load: layer -> int64 [E]. max_vio is the worst layer; load_min and load_max are fractions of the mean over all layers' experts;
    load_entropy is the mean over layers of H(load)/ln(E), 1 when uniform; dead_experts counts experts without a token."""
    if not load:
        return {}
    layers = [load[layer].double() for layer in sorted(load)]
    relative = [counts / counts.mean().clamp(min=1e-12) for counts in layers]
    per_layer = [float(r.max()) - 1 for r in relative]
    entropies = []
    for counts in layers:
        share = counts / counts.sum().clamp(min=1)
        entropies.append(float(-(share * share.clamp(min=1e-300).log()).sum()) / math.log(max(len(counts), 2)))
    return {
        "max_vio": max(per_layer),
        "max_vio_per_layer": per_layer,
        "load_min": min(float(r.min()) for r in relative),
        "load_mean": sum(float(counts.mean()) for counts in layers) / len(layers),
        "load_max": max(float(r.max()) for r in relative),
        "load_entropy": sum(entropies) / len(entropies),
        "dead_experts": float(sum(int((counts == 0).sum()) for counts in layers)),
    }
