"""Models: inspection, loading and saving, packed and padded execution, and the check that these are equal."""
