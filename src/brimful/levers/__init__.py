"""Techniques: one file per lever; what it does to the arithmetic, where it works, what it costs."""
