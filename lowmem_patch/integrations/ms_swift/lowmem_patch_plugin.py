"""ms-swift: a file for ``--external_plugins``, beside ``--callbacks lowmem_patch``.

The preset and a memory budget come from the environment, since swift's arguments are its own:
``LOWMEM_PATCH_PRESET`` (default auto) and ``LOWMEM_PATCH_FIT``. This file has a folder of its own, because
swift puts the folder on ``sys.path``.
"""

from __future__ import annotations

import os
from typing import Any

from swift.callbacks import callbacks_map

from lowmem_patch.integrations import LowmemTrainerCallback


def make_callback(args: Any, trainer: Any) -> LowmemTrainerCallback:
    """The callback, as swift asks for one: with its arguments and the trainer that will have it."""
    template = getattr(trainer, "template", None)
    return LowmemTrainerCallback(
        os.environ.get("LOWMEM_PATCH_PRESET", "auto"),
        fit=os.environ.get("LOWMEM_PATCH_FIT"),
        sequence_length=getattr(template, "max_length", None),
    )


callbacks_map["lowmem_patch"] = make_callback
