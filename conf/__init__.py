"""Hydra groups. Data only; the code that composes them is moe_train/config/compose.py."""
