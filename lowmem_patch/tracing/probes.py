"""Numerical probes: a module is taken for a norm or an activation by its outputs, never by its name.

``isinstance`` over-matches (timm's LayerNorm2d is a LayerNorm) and under-matches (timm's and
transformers' GELUs are no ``nn.GELU``), and ``config.hidden_act`` can lie. So a candidate is copied
with small random parameters and run on a few rows; what it returns must be a LayerNorm, an RMSNorm
or an activation of the step tables, to float32 accuracy.
"""

from __future__ import annotations

import copy
import dataclasses
import inspect
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any, get_args

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from lowmem_patch import reference
from lowmem_patch.constants import STOCK_NAMES, NormSettings
from lowmem_patch.functional import ActivationKind
from lowmem_patch.nn.own import align_as, runs_class_forward
from lowmem_patch.tracing.base_model import is_leaf
from lowmem_patch.tracing.call_arguments import CalledFunction
from lowmem_patch.tracing.isolation import NoForeignKernels
from lowmem_patch.tracing.op_roles import Role, role_of
from lowmem_patch.tracing.probed_gradients import (
    FAR,
    GRID,
    NEAR,
    SMALL,
    has_gradients_of_norm,
    has_slope_of,
    is_close,
)
from lowmem_patch.tracing.shadow import attributes_of, node_of, tensors_in
from lowmem_patch.tracing.trace import Call, Trace


@dataclasses.dataclass(frozen=True)
class NormSpec:
    """What a norm computes over one dimension."""

    kind: str  # layer_norm or rms_norm
    settings: NormSettings
    output: str  # its dtype follows the "input", the "weight" or, promoted, "both"
    full_precision_autocast: bool
    names: tuple[str, str] = STOCK_NAMES  # of gamma and beta; empty: there is none
    dim: int = -1  # or 1, the channels of images: they lie last in the output's memory


_ACTIVATION_INPUTS = torch.cat((GRID, FAR, NEAR))
_ACTIVATION_TOLERANCE = 1e-5
# of norms that write it out, and hold it in no attribute
_USUAL_EPS = (1e-5, 1e-6, 1e-12, 1e-8, 1e-3, torch.finfo(torch.float32).eps)
_OF_EVERY_MODULE = vars(nn.Module()).keys()
# F.normalize divides by no less: the same for rows of zeros and for all but tiny ones
_NORMALIZE_EPS = 1e-12


def looks_like_norm(module: nn.Module) -> bool:
    """Whether a user would expect this module in a list of norms (its name decides nothing else)."""
    return is_leaf(module) and "norm" in type(module).__name__.lower()


def looks_like_activation(module: nn.Module) -> bool:
    """Whether a user would expect this module in a list of activations: elementwise, and from their home."""
    homes = ("torch.nn.modules.activation", "transformers.activations", "timm.layers.activations")
    if (
        not is_leaf(module)
        or not type(module).__module__.startswith(homes)
        or list(module.parameters())
    ):
        return False
    isolated = isolated_copy(module)
    whole, half = run_probe(isolated, GRID.clone()), run_probe(isolated, GRID[::2].clone())
    return whole is not None and half is not None and bool((whole[::2] == half).all())


def isolated_copy(module: nn.Module) -> nn.Module:
    """A copy on the CPU with random float32 parameters of both signs, and without hooks."""
    memo: dict[int, Any] = {}
    generator = torch.Generator().manual_seed(0)
    for tensor in (*module.parameters(), *module.buffers()):
        value = torch.rand(tensor.shape, generator=generator) + 0.5
        value *= torch.where(torch.rand(tensor.shape, generator=generator) < 0.5, -1.0, 1.0)
        memo[id(tensor)] = nn.Parameter(value) if isinstance(tensor, nn.Parameter) else value
    for tensor in tensors_in([attributes_of(each) for each in module.modules()]):
        # what a forward left there: torch copies neither a fake tensor nor one that hangs on a graph
        if isinstance(tensor, FakeTensor):
            memo.setdefault(id(tensor), torch.zeros(tensor.shape))
        elif node_of(tensor) is not None:
            memo.setdefault(id(tensor), tensor.detach())
    isolated = copy.deepcopy(module, memo)
    for hooks in ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"):
        getattr(isolated, hooks).clear()
    align_as(isolated, nn.Identity())  # without accelerate's hook, which moves rows to its device
    return isolated.eval()


def probed_rows(dimensions: int, size: int) -> Tensor:
    """Rows ``[..., 4, size]`` in which no dimension is 1, float32."""
    shape = (2,) * (dimensions - 2) + (4, size)
    return torch.randn(shape, generator=torch.Generator().manual_seed(1)) + 0.3


def run_probe(function: Callable[[Tensor], Any], x: Tensor) -> Tensor | None:
    try:
        with (
            warnings.catch_warnings(action="ignore"),  # of rows that only a probe gives
            torch.no_grad(),
            torch.autocast("cpu", enabled=False),
            NoForeignKernels(),
        ):
            output = function(x)
    except Exception:  # a module that cannot run on plain rows is no candidate
        return None
    return output if isinstance(output, Tensor) and output.shape == x.shape else None


def is_steady(isolated: nn.Module, x: Tensor) -> bool:
    """Whether it computes the same in training and outside of it, writes into no buffer, and leaves nothing
    on itself, which somebody may read there."""
    before = [buffer.clone() for buffer in isolated.buffers()]
    isolated.eval()
    held = {**vars(isolated)}
    with torch.random.fork_rng(devices=()):
        trained = run_probe(isolated.train(), x)
    written = not all(map(torch.equal, before, isolated.buffers()))
    output = run_probe(isolated.eval(), x)
    left = any(held.get(name) is not value for name, value in vars(isolated).items())
    same = trained is not None and output is not None and torch.equal(trained, output)
    return same and not (written or left)


_PLAIN = frozenset((bool, int, float, str, torch.dtype, type(None)))


def _told(value: object) -> object:
    """Equal for equal numbers and texts, and tuples of them (the shape of a LayerNorm), of equal types."""
    kind = type(value)
    if kind in _PLAIN:
        return kind, repr(value)  # -0.0 is 0.0
    if isinstance(value, tuple) and kind in (tuple, torch.Size):
        return kind, tuple(map(_told, value))
    return object()


def settings_of(module: nn.Module) -> tuple[object, ...]:
    """Equal for modules that compute the same but for their parameters' values; else unequal."""
    hidden = any("__slots__" in vars(base) for base in type(module).__mro__)
    if module._buffers or module._modules or hidden:
        return (object(),)
    parameters = tuple(
        (name, None if one is None else (one.shape, one.dtype))
        for name, one in module._parameters.items()
    )
    values = tuple(
        (name, _told(value))
        for name, value in sorted(vars(module).items())
        if name not in _OF_EVERY_MODULE and name != "forward"  # accelerate's, around the class's
    )
    return type(module), values, parameters


def means_something_else(module: nn.Module, call: Call) -> bool:
    """Whether a call gives None where that is not the default, with which a probe runs."""
    if call.given == 1:
        return False
    _, *others = inspect.signature(module.forward).parameters.values()
    kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return any(one.default is not None and one.kind not in kinds for one in others)


_STOCK = (nn.LayerNorm, nn.RMSNorm)


def match_norm(
    module: nn.Module, call: Call, trace: Trace, known: dict[object, NormSpec | str] | None = None
) -> NormSpec | str:
    """The spec of a norm, or the reason why it is none that we know.

    ``call`` is one traced call of the module. ``known`` remembers answers between equal modules of
    one model, which are probed once.
    """
    if not call.takes_one or len(call.outputs) != 1 or means_something_else(module, call):
        return "takes or returns more than one tensor"
    x = call.inputs[0]
    if not x.is_floating_point() or x.dim() < 2 or call.outputs[0].shape != x.shape:
        return "does not return its input's shape"
    dims = list(_dims_of(x, module))
    if not dims:
        return "does not normalise the last dimension alone, or the channels"
    if {name for name, _ in module.named_buffers()} & {"weight", "bias"}:
        return "its weight or bias is a buffer and no parameter"
    if not runs_class_forward(module):
        return "its forward is overridden on the instance"
    known = {} if known is None else known
    settings = (*settings_of(module), x.dim(), *((dim, x.shape[dim]) for dim in dims))
    if settings not in known:
        known[settings] = _probe_each(module, call, trace, dims)
    return known[settings]


def _dims_of(x: Tensor, module: nn.Module) -> Iterator[int]:
    """Which dimensions of ``x`` a module's gamma and beta may belong to."""
    parameters = list(module.parameters())
    if len(parameters) > 2:
        return
    shapes = {parameter.shape for parameter in parameters}
    if shapes <= {(x.shape[-1],)}:
        yield -1
    # no batch norm, of which a model has many, and whose buffers make each one unlike the others
    if x.dim() > 2 and shapes == {(x.shape[1],)} and not any(True for _ in module.buffers()):
        yield 1


def _probe_each(module: nn.Module, call: Call, trace: Trace, dims: list[int]) -> NormSpec | str:
    """What a module computes over the first of these dimensions over which it is a norm."""
    answers = [_probe(module, call, trace, dim) for dim in dims]
    return next((answer for answer in answers if isinstance(answer, NormSpec)), answers[0])


def _with_channels_last(forward: Callable[[Tensor], Tensor], rows: Tensor) -> Tensor:
    return forward(rows.movedim(-1, 1)).movedim(1, -1)


def _probe(module: nn.Module, call: Call, trace: Trace, dim: int) -> NormSpec | str:
    """Run a copy of the module on a few rows, which it gets along ``dim``."""
    if any(_is_computed(value) for value in vars(module).values()):
        return "its weight or bias is computed from another parameter"  # of which no copy is made
    x, parameters = call.inputs[0], dict(module.named_parameters())
    isolated = isolated_copy(module)
    if dim != -1:
        isolated.forward = partial(_with_channels_last, isolated.forward)
    rows = probed_rows(x.dim(), x.shape[dim])
    found, names = _settings_and_names(isolated, rows, parameters)
    if found is None:
        where = "the last dimension" if dim == -1 else "the channels"
        return f"computes neither LayerNorm nor RMSNorm over {where}"
    if not is_steady(isolated, rows):
        return "computes something else in training, writes into a buffer, or leaves a value on the module"
    stock = type(module) in _STOCK  # whose gradients over one channel are nothing but rounding
    if not (stock or has_gradients_of_norm(isolated, rows, names, found)):
        return "its gradients, or its values far out, are not those of the norm that it seems to be"
    kind = "layer_norm" if found.centered else "rms_norm"
    fused = any(op.role.has(Role.ROW_NORM) for op in trace.ops[call.first_op : call.last_op])
    # who reads an output that lies otherwise may ask for a view; torch's own norm lays it so for any input
    if not (dim == -1 or (fused and call.outputs[0].movedim(dim, -1).is_contiguous())):
        return "its channels do not lie last in the output's memory"
    output = output_dtype(isolated, rows) if parameters else "input"
    return NormSpec(kind, found, output, full_precision_autocast=fused, names=names, dim=dim)


def _settings_and_names(
    isolated: nn.Module, rows: Tensor, parameters: Iterable[str]
) -> tuple[NormSettings | None, tuple[str, str]]:
    """What a module computes of these rows, None where it is no norm, and its names of gamma and beta."""
    for names in _orders_of(parameters):
        found = find_norm(isolated, rows, names, vars(isolated))
        if found is not None:
            return found, names
    return None, STOCK_NAMES


def _is_computed(value: object) -> bool:
    """Whether a hook of the module has made it in the trace, such as a pruned weight, which may be frozen."""
    made = isinstance(value, Tensor) and value.grad_fn is not None
    return made or isinstance(value, FakeTensor)


def _orders_of(parameters: Iterable[str]) -> list[tuple[str, str]]:
    """Which of the parameters may be gamma, and which beta."""
    if set(parameters) <= set(STOCK_NAMES):
        return [STOCK_NAMES]
    first, second = (*parameters, "")[:2]
    return [(first, second), (second, first)] if second else [(first, second)]


def output_dtype(module: nn.Module, rows: Tensor) -> str:
    """Which dtype the output has where weight and input differ: a residual or weights in float32."""
    weight_float32 = run_probe(module, rows.bfloat16())
    input_float32 = run_probe(module.bfloat16(), rows)
    if weight_float32 is None or weight_float32.dtype != torch.float32:
        return "input"
    by_weight = input_float32 is not None and input_float32.dtype == torch.bfloat16
    return "weight" if by_weight else "both"


def find_norm(
    module: Callable[[Tensor], Any],
    rows: Tensor,
    names: tuple[str, str],
    attributes: Mapping[str, object],
) -> NormSettings | None:
    """What a module computes of these rows, or None: no norm. Its eps may be one of the ``attributes``."""
    vectors = (getattr(module, name, None) for name in names)
    gamma, beta = (v.detach().double() if isinstance(v, Tensor) else None for v in vectors)
    # small rows make eps visible: at a scale of 1e-3 the variance is 1e-6
    scales = (1.0, 1e-3, 1e-6, 1e-9, 0.0)
    outputs = [run_probe(module, rows * scale) for scale in scales]
    if outputs[0] is None:
        return None
    named = {v for v in attributes.values() if isinstance(v, float) and 0 <= v < 1}
    for offset, centered in ((0.0, True), (0.0, False), (1.0, False), (1.0, True)):
        for eps in (*sorted(named), *_USUAL_EPS, _NORMALIZE_EPS**2 / rows.shape[-1]):
            settings = NormSettings(eps, offset, centered)
            wanted = (
                reference.norm(rows.double() * scale, gamma, beta, settings, torch.float64)[0]
                for scale in scales
            )
            if all(map(is_close, outputs, wanted)):
                return settings
    return None


def match_activation(
    module: nn.Module, known: dict[object, ActivationKind | None] | None = None
) -> ActivationKind | None:
    """The kind of a parameterless elementwise module, or None; ``known`` as of `match_norm`."""
    if not is_leaf(module) or list(module.parameters()) or not runs_class_forward(module):
        return None
    known = {} if known is None else known
    settings = settings_of(module)
    if settings not in known:
        isolated = isolated_copy(module)
        kind = _kind_of(isolated)
        steady = kind is None or is_steady(isolated, GRID.clone())
        known[settings] = kind if steady else None
    return known[settings]


class _Function(nn.Module):
    """A function that is looked at as a module is; its numbers are attributes, as those of a norm are."""

    def __init__(self, function: Callable[..., Any], called: CalledFunction) -> None:
        super().__init__()
        self.function = function
        self.called = called
        self.numbers = dict(called.kwargs)
        self.eps = next(
            (v for v in (*called.args, *self.numbers.values()) if type(v) is float), None
        )

    def forward(self, x: Tensor) -> Any:
        return self.function(x, *self.called.args, **self.numbers)


def match_function(
    function: Callable[..., Any], called: CalledFunction, call: Call, trace: Trace
) -> ActivationKind | NormSpec | None:
    """What a function computes with these arguments behind the tensor, or None: no activation and no norm."""
    module = _Function(function, called)
    if not role_of(called.name).has(Role.ROW_NORM):
        return _kind_of(module)
    found = match_norm(module, call, trace)
    return found if isinstance(found, NormSpec) else None


def _kind_of(function: Callable[[Tensor], Any]) -> ActivationKind | None:
    output = run_probe(function, _ACTIVATION_INPUTS.clone())
    if output is None:
        return None
    kind: ActivationKind
    for kind in get_args(ActivationKind):
        expected = reference.activate(_ACTIVATION_INPUTS.double(), kind)
        # each value by its own size: where h is small, a slope or an alpha shows that is another one
        size = expected.abs().clamp_min(SMALL)
        if ((output.double() - expected).abs() <= _ACTIVATION_TOLERANCE * size).all():
            return kind if has_slope_of(function, kind) else None
    return None
