"""Decide, report, carry out and undo: the strategies' patches on one model."""
