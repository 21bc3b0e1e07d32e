"""An external plugin of ms-swift: the callback ``watch``."""

from __future__ import annotations

from typing import Any

from swift.callbacks import callbacks_map

from tests.integrations.scripts.watch import Watch


def make_watch(args: Any, trainer: Any) -> Watch:
    return Watch()


callbacks_map["watch"] = make_watch
