"""Ways into trainers that build or wrap the model themselves; each library is imported when it is asked for.

``LowmemTrainerCallback``: transformers' Trainer and all of TRL. ``LowmemLightningCallback``: Lightning.
``LowmemAxolotlPlugin``: Axolotl. ms-swift takes the file ``ms_swift/lowmem_patch_plugin.py``. A script that
cannot be changed is run by ``lowmem-patch run``.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lowmem_patch.integrations.axolotl_plugin import LowmemAxolotlPlugin
    from lowmem_patch.integrations.lightning_callback import LowmemLightningCallback
    from lowmem_patch.integrations.trainer_callback import LowmemTrainerCallback

__all__ = ["LowmemAxolotlPlugin", "LowmemLightningCallback", "LowmemTrainerCallback"]

_FILES = {
    "LowmemAxolotlPlugin": "axolotl_plugin",
    "LowmemLightningCallback": "lightning_callback",
    "LowmemTrainerCallback": "trainer_callback",
}


def __getattr__(name: str) -> Any:
    if name not in _FILES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_FILES[name]}"), name)
