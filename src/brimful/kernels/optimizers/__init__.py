"""Optimizer updates as kernels, each beside its reference."""
