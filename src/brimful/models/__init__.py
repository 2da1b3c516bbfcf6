"""Models: intake, loading and saving, packed and padded execution, and the equivalence check that they are equal."""
