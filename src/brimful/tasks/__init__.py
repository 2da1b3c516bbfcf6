"""Tasks: the loss sum, its denominator and the metrics of single-label, multi-label and regression classifiers.

Also what their logits mean: labels and scores as columns and as objects, of candidate labels too, and their parity.
"""
