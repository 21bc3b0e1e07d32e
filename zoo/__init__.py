"""The zoo: tiny models of every architecture, patched and judged against float64.

``python -m zoo`` runs all of it and writes docs/coverage.md; tests/zoo runs a fixed spread.
"""
