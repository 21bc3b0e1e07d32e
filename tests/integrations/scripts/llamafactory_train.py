"""LLaMA-Factory's own training of a YAML file, as its launcher starts it, watched by a callback."""

from __future__ import annotations

import sys
from typing import Any

from llamafactory.train.tuner import run_exp
from omegaconf import OmegaConf

from tests.integrations.scripts.watch import Watch

config: Any = OmegaConf.to_container(OmegaConf.load(sys.argv[1]))
run_exp(config, callbacks=[Watch()])
