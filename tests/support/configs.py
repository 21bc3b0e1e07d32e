"""Configurations that many tests patch with, each under the name of what it isolates."""

from __future__ import annotations

from typing import Any

Config = dict[str, Any]

# every derivative is exact in these three, which differ in the norms alone
FOLD: Config = {"norms": "fold", "activations": "recompute"}
SHARE: Config = {"norms": "share", "activations": "recompute"}
AUTO_WITHOUT_CODES: Config = {"norms": "auto", "activations": "recompute"}
FOLD_AND_SHARE = [FOLD, SHARE]

# one strategy at work; with the norms as they are every bit stays, since sharing rounds their input
KEEP: Config = {"norms": "keep", "activations": "keep", "linear_inputs": "keep", "head": "keep"}
FUSED: Config = {**KEEP, "attention": "fused"}
ONE_COPY: Config = {**KEEP, "linear_inputs": "one_copy"}
RECOMPUTE: Config = {**ONE_COPY, "activations": "recompute", "attention": "keep"}
