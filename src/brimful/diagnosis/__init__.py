"""Findings in words, from records alone: what stands out, and what to do about it."""
