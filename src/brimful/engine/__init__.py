"""The loops around the step: train, evaluate, classify, and their checkpoints and records."""
