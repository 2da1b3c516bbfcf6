"""Find, inspect, load and save Hugging Face models."""
