"""Evaluation of a model on labelled rows, or of answers that were given before."""
