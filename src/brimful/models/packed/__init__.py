"""The packed forward pass and the equivalence check that admits a model to it."""
