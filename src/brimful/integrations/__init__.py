"""Integrations: trackers."""
