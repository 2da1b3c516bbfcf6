"""Ways to train one model, ours and transformers' Trainer's, measured side by side."""
