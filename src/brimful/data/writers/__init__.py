"""Rows into files that are whole or absent."""
