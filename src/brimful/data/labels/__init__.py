"""Text and label columns, and the examples they make."""
