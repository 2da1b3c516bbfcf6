"""The training loop, its preparation, checkpoints and run folder."""
