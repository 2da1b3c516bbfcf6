"""Fused pieces of transformer layers, each beside its reference."""
