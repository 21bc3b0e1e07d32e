"""docs/coverage.md from the results."""


def write_table(a, b):
    pass
