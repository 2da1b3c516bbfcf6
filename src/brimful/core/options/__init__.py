"""Options of each command, a file for each. A flag is a field with its default; the docstring under it is its help."""
