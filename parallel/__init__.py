"""Parallelism on torch.distributed; imports nothing of moe_train."""
