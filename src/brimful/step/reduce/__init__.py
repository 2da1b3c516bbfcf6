"""Sums of gradients over processes, beside the backward pass that they come from."""
