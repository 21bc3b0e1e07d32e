"""Training variants of one model side by side: memory and time of a step, interleaved in one process."""

from lowmem_patch.bench.compare import Comparison as Comparison
from lowmem_patch.bench.compare import Row as Row
from lowmem_patch.bench.compare import compare as compare
from lowmem_patch.bench.environment import environment as environment
from lowmem_patch.bench.shapes import SHAPES as SHAPES
from lowmem_patch.bench.shapes import Shape as Shape
from lowmem_patch.bench.variants import VARIANTS as VARIANTS
from lowmem_patch.bench.variants import compiled as compiled
from lowmem_patch.bench.variants import curve_variants as curve_variants
from lowmem_patch.bench.variants import find_variant as find_variant
from lowmem_patch.bench.variants import unpatched as unpatched
