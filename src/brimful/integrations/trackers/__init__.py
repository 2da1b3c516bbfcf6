"""Trackers: a process for each follows a run's log and sends it on, so that training neither waits nor fails for it."""
