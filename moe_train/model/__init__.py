"""The model as plain PyTorch, readable beside the papers' equations. Knows no process group, rank, environment variable or config
framework."""
