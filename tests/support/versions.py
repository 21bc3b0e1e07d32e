"""What the installed releases of other packages can do, for tests of the oldest and the newest."""

from __future__ import annotations

from importlib.metadata import version
from inspect import signature
from typing import Any

from packaging.version import Version

# The interpreter of Triton 3.6 makes int() of arrays with one element; numpy 2.4 refuses that.
OLD_TRITON = ("-W", "ignore:Conversion of an array with ndim:DeprecationWarning")


def cache_of(model: Any) -> str:
    """What the forward of a transformers model calls its cache: ``cache`` since 5.24."""
    return "cache" if "cache" in signature(model.forward).parameters else "past_key_values"


def before(package: str, release: str) -> bool:
    """Whether the installed ``package`` is older than ``release``."""
    return Version(version(package)) < Version(release)
