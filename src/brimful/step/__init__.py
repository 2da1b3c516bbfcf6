"""One optimizer step: accumulate, reduce, update."""
