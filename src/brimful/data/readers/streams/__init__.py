"""Sources of any size, read a few thousand rows at a time."""
