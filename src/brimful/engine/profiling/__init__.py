"""Profile of a training step."""
