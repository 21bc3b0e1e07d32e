"""Strategies that take less time and save no less."""
