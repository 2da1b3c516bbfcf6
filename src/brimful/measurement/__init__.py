"""Measurements of a device: its peaks, and the kernels of a step."""
