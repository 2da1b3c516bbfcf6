"""Facts about the machine, and what its memory reads."""
