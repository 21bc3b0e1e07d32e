"""Rendering: plans, conversions, verdicts and measurements as tables. The only importer of rich.

`layout` needs no torch, so that a spinner turns while a command imports what `results` prints.
"""
