"""Tasks: loss sum, denominator and metrics of single-label, multi-label and regression classifiers.

Also the answers from their logits, as columns and as objects, and their equivalence with the plain model's.
"""
