"""Optimizer updates: from gradients to weights."""
