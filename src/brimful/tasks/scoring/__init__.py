"""Scores of a classifier on labelled rows: sums in a stream, intervals by resampling them, and simple baselines."""
