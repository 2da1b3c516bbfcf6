"""Metrics of rows that come in parts, in memory that does not grow with their number. Equal to scikit-learn's.

Legend: M rows of a part, N of all, C outputs.
"""
