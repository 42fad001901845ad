"""moe_train: train Mixture-of-Experts language models on any layout."""

__version__ = "0.1.0"
