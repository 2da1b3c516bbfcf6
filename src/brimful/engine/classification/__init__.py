"""Classification: rows in, the same rows with their answers out."""
