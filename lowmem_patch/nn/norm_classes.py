"""MS norms of a class or with parameter names that somebody asks for: as the original had."""

from __future__ import annotations

from typing import Any

from torch import nn

from lowmem_patch.constants import STOCK_NAMES
from lowmem_patch.nn.norms import MSLayerNorm, MSNorm, MSRMSNorm


class StockMSLayerNorm(MSLayerNorm, nn.LayerNorm):  # type: ignore[misc]  # its weight may be None
    """In place of a `torch.nn.LayerNorm`, which it still is to whoever asks: transformers' Trainer decays
    the weights of no such module."""


class StockMSRMSNorm(MSRMSNorm, nn.RMSNorm):  # type: ignore[misc]  # its weight may be None
    """In place of a `torch.nn.RMSNorm`, which it still is to whoever asks."""


class NamedMSNorm(MSNorm):
    """In place of a norm whose gamma and beta have names of their own."""

    def __getattr__(self, name: str) -> Any:
        called = dict(zip(STOCK_NAMES, self.__dict__.get("names", STOCK_NAMES), strict=True))
        own = called.get(name, name)
        if own == name:
            return super().__getattr__(name)
        return getattr(self, own) if own else None


class NamedMSLayerNorm(NamedMSNorm, MSLayerNorm):
    """See `NamedMSNorm`."""


class NamedMSRMSNorm(NamedMSNorm, MSRMSNorm):
    """See `NamedMSNorm`."""
