"""Data: files to rows, rows to examples, examples to tokens, tokens to fixed-shape micro-batches."""
