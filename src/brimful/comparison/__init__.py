"""Runs, evaluations and benches side by side, from their folders alone and without torch."""
