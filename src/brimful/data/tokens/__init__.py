"""Texts to token ids."""
