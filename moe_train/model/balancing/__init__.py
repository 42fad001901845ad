"""Balancing methods, one file each, with the paper's equation in the docstring."""
