"""The fixture of tests/patching that builds each family once."""

from tests.patching.conftest import make

__all__ = ["make"]
