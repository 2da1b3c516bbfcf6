"""Models: intake, loading and saving, packed and padded execution, and the proof that they are equal."""
