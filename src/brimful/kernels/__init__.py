"""Kernels, each beside its plain twin."""
