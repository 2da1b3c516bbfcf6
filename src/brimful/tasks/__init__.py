"""Tasks: the loss sum, its denominator and the metrics of single-label, multi-label and regression classifiers."""
