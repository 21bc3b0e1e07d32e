"""Training variants of one model side by side: memory and time of a step, interleaved in one process."""

from lowmem_patch.bench.compare import compare
from lowmem_patch.bench.environment import environment
from lowmem_patch.bench.result import Comparison, Row
from lowmem_patch.bench.shapes import SHAPES, Shape
from lowmem_patch.bench.variants import VARIANTS, compiled, curve_variants, find_variant, unpatched

__all__ = [
    "SHAPES",
    "VARIANTS",
    "Comparison",
    "Row",
    "Shape",
    "compare",
    "compiled",
    "curve_variants",
    "environment",
    "find_variant",
    "unpatched",
]
