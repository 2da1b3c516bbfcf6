"""Sequences to fixed-shape micro-batches, prefetched to the device."""
