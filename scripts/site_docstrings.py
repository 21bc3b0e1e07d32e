"""An extension of griffe, which reads the package for the API page: how this project writes docstrings."""

from __future__ import annotations

import re
from typing import Any

import griffe


class Docstrings(griffe.Extension):
    """``Example:`` holds a session of Python, and Sphinx's roles are names."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            text = re.sub(r"^( *)Example:$", r"\1Examples:", obj.docstring.value, flags=re.M)
            obj.docstring.value = re.sub(r":(?:attr|class|data|func|meth|mod):(?=`)", "", text)
