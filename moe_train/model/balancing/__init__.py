"""Balancing methods, one file each, with the paper's equation in the docstring.

`load_balance` (micro-batch, sequence-wise, global-batch losses), `z_loss`, `sign_bias`, `quantile`, `sinkhorn`; `inject` puts a loss's
gradient into the graph, `update` moves the biases once a step, `metrics` says how balanced a step was.
"""

from moe_train.model.balancing.metrics import load_metrics
from moe_train.model.balancing.update import update_biases

__all__ = ["load_metrics", "update_biases"]
