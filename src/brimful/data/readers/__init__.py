"""Rows of files, pipes and hub data sets."""
