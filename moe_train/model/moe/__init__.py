"""Mixture of experts: router -> dispatch -> experts -> combine, plus shared experts."""

from moe_train.model.moe.layer import MoE
from moe_train.model.moe.router import Router, Routing

__all__ = ["MoE", "Router", "Routing"]
