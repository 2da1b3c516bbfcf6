"""Attention over packed sequences: the kernels, their references, and the choice between them."""
