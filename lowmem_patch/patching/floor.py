"""The floor: bytes that the rule lets autograd keep between forward and backward, from a trace.

The rule (for each token, and nothing else):

1. the input of a matmul whose weight trains: once, in the compute dtype, shared by all its readers.
   Where that input is act(x) or act(gate) * up, x or gate and up count instead, since the input is
   recomputed from them; a cast made for an adapter, and a dropout's result, count as their source;
2. what attention itself keeps, as the model implements it, but no cast of a softmax's output;
3. 2-bit codes of an activation whose input nothing above keeps, per-row statistics of norms, one bit
   for each element of a dropout, and what no backward can do without: the output of a norm that no
   trained matmul reads, and both factors of an act(gate) * up that no trained matmul reads.

It is counted on the unpatched model, so that it does not depend on what a patch can do.
"""

from __future__ import annotations

import dataclasses
import math

from torch import Tensor, nn

from lowmem_patch.dropouts import dropout_call
from lowmem_patch.kinds import ELEMENTWISE, KINDS, MATMULS, WEIGHTED
from lowmem_patch.patching.match import NormSpec, looks_like_norm, match_activation, match_norm
from lowmem_patch.patching.sites import block_name
from lowmem_patch.patching.trace import Call, Op, Trace
from lowmem_patch.saved import SavedStorage, storage_key

__all__ = ["Floor", "FloorItem", "count_floor"]

_STATISTIC = 4  # bytes of rstd per row: float32 whatever the activations are
_CODES_PER_BYTE = 4
_FLAGS_PER_BYTE = 8
_CASTS = frozenset(("to", "type_as", "type", "float", "half", "bfloat16", "double"))
_SAME_VALUES = frozenset(
    ("view", "reshape", "flatten", "unflatten", "squeeze", "unsqueeze", "contiguous", "clone", "permute",
     "transpose", "swapaxes", "swapdims", "roll", "t", "T", "movedim", "detach", "requires_grad_")
)  # fmt: skip
_SELECTIONS = frozenset(("__getitem__", "pad", "chunk", "split", "unbind", "narrow"))
_PRODUCTS = frozenset(("mul", "__mul__", "__rmul__", "multiply"))


@dataclasses.dataclass(frozen=True)
class FloorItem:
    """One tensor that the rule allows.

    Attributes:
        module: the path of the module that needs it first.
        kind: one of ``lowmem_patch.kinds.KINDS``.
        bytes: its size.
    """

    module: str
    kind: str
    bytes: int


@dataclasses.dataclass(frozen=True)
class Floor:
    """Bytes that the rule allows, item by item."""

    items: tuple[FloorItem, ...]

    @property
    def total(self) -> int:
        return sum(item.bytes for item in self.items)

    @property
    def by_kind(self) -> dict[str, int]:
        sizes = dict.fromkeys(KINDS, 0)
        for item in self.items:
            sizes[item.kind] += item.bytes
        return sizes

    @property
    def by_block(self) -> dict[str, int]:
        sizes: dict[str, int] = {}
        for item in self.items:
            block = block_name(item.module)
            sizes[block] = sizes.get(block, 0) + item.bytes
        return sizes


def count_floor(model: nn.Module, trace: Trace) -> Floor:
    """The floor of a traced forward.

    Args:
        model: the shadow (or model) that was traced, unpatched.
        trace: of its forward, with its structure.
    """
    return _Counter(model, trace).count()


def _is_cast(storage: SavedStorage, softmax: SavedStorage, module: str) -> bool:
    """Whether a matmul keeps a narrow copy of what this softmax keeps for its own backward."""
    saver = storage.savers[0]
    return (
        saver.function in MATMULS
        and f"{module}.".startswith(f"{saver.module}.")
        and math.prod(storage.shape) == math.prod(softmax.shape)
        and storage.dtype.itemsize < softmax.dtype.itemsize
    )


class _Counter:
    def __init__(self, model: nn.Module, trace: Trace) -> None:
        self.trace = trace
        self.modules = dict(model.named_modules())
        self.makers: dict[int, Op] = {id(out): op for op in trace.ops for out in op.outputs}
        self.norms: list[tuple[str, Tensor, Tensor]] = []  # module, input, output
        self.norm_outputs: set[int] = set()
        self.activations: dict[int, Tensor] = {}  # input, by the id of the output
        self.activation_modules: dict[int, str] = {}
        self.widths: dict[int, int] = {}  # narrowest read by a matmul, by the id of the root
        self.specs: dict[object, NormSpec | str] = {}  # of equal modules
        self.items: dict[object, FloorItem] = {}
        self.attention: set[int] = set()  # keys of storages

    def count(self) -> Floor:
        self._find_sites()
        self._attention()
        matmuls = [(op, found) for op in self.trace.ops if (found := self._matmul(op)) is not None]
        for op, (x, _) in matmuls:
            width = self._root(x)[1]
            if op.autocast:
                width = min(width, op.outputs[0].element_size())
            self._note_width(x, width)
        for op, (x, weight) in matmuls:
            if weight.requires_grad:
                for source in self._sources(x):
                    self._keep(source, op.module, "linear inputs")
        self._products()
        self._dropouts({id(x) for _, (x, weight) in matmuls if weight.requires_grad})
        for module, source, output in self.norms:
            self._norm(module, source, output)
        for key, source in self.activations.items():
            if source.requires_grad and not self._kept(source):
                size = -(-source.numel() // _CODES_PER_BYTE)
                module = self.activation_modules[key]
                self.items["codes", key] = FloorItem(module, "codes and statistics", size)
        return Floor(tuple(self.items.values()))

    # what the model does

    def _find_sites(self) -> None:
        covered: set[int] = set()
        kinds: dict[str, str | None] = {}
        for call in self.trace.calls:
            if call.name not in kinds:
                kinds[call.name] = self._site_kind(call)
            kind = kinds[call.name]
            if kind is not None and len(call.inputs) == len(call.outputs) == 1:
                covered.update(range(call.first_op, call.last_op))
                self._add_site(call.name, kind, call.inputs[0], call.outputs[0])
        for number, op in enumerate(self.trace.ops):
            if number in covered or not op.args or len(op.outputs) != 1:
                continue
            if isinstance(op.args[0], Tensor) and op.name in ELEMENTWISE | {
                "layer_norm",
                "rms_norm",
            }:
                kind = "activation" if op.name in ELEMENTWISE else "norm"
                self._add_site(op.module, kind, op.args[0], op.outputs[0])

    def _site_kind(self, call: Call) -> str | None:
        module = self.modules[call.name]
        if call.name == "" or next(module.children(), None) is not None:
            return None
        if len(call.inputs) != 1 or len(call.outputs) != 1:
            return None
        if looks_like_norm(module):
            return "norm"
        names = {name for name, _ in module.named_parameters()}
        if not names and call.outputs[0].shape == call.inputs[0].shape:
            return "activation" if match_activation(module) is not None else None
        if names and names <= {"weight", "bias"} and not isinstance(module, nn.Linear):
            found = match_norm(module, call, self.trace, self.specs)
            return "norm" if isinstance(found, NormSpec) else None
        return None

    def _add_site(self, module: str, kind: str, source: Tensor, output: Tensor) -> None:
        if not output.requires_grad or source is output:
            return
        if kind == "norm":
            self.norms.append((module, source, output))
            self.norm_outputs.add(id(output))
        else:
            self.activations[id(output)] = source
            self.activation_modules[id(output)] = module

    def _attention(self) -> None:
        wide = [
            (storage, saver.module)
            for storage in self.trace.saved.storages
            for saver in storage.savers
            if saver.function == "softmax"
        ]
        for storage in self.trace.saved.storages:
            if storage.kind != "attention":
                continue
            softmax = next((pair for pair in wide if _is_cast(storage, *pair)), None)
            if softmax is not None:
                wide.remove(softmax)
            else:
                item = FloorItem(storage.savers[0].module, "attention", storage.bytes)
                self.items["attention", storage.key] = item
                self.attention.add(storage.key)

    def _matmul(self, op: Op) -> tuple[Tensor, Tensor] | None:
        """Input and weight of a matmul of a parameter."""
        if op.name == "addmm" and len(op.args) == 3:
            return op.args[1], op.args[2]
        values = [
            value
            for value in (*op.args, *op.kwargs.values())
            if isinstance(value, Tensor) and value.is_floating_point()
        ]
        if len(values) < 2 or op.name not in WEIGHTED | MATMULS:
            return None
        x, weight = values[:2]
        if op.name in MATMULS and self._is_parameter(x):
            x, weight = weight, x
        return (x, weight) if op.name in WEIGHTED or self._is_parameter(weight) else None

    def _is_parameter(self, tensor: Tensor | None) -> bool:
        while tensor is not None:
            if id(tensor) in self.trace.parameters:
                return True
            op = self.makers.get(id(tensor))
            first = op.args[0] if op is not None and op.args else None
            moves = op is not None and op.name in _SAME_VALUES | _CASTS | _SELECTIONS
            tensor = first if moves and isinstance(first, Tensor) else None
        return False

    def _note_width(self, tensor: Tensor | None, width: int) -> None:
        """A matmul reads ``tensor``, or a selection of it, with so many bytes an element."""
        while tensor is not None:
            root = self._root(tensor)[0]
            self.widths[id(root)] = min(width, self.widths.get(id(root), width))
            op = self.makers.get(id(root))
            if op is None or op.name not in _SELECTIONS or id(root) in self.norm_outputs:
                return
            tensor = op.args[0] if isinstance(op.args[0], Tensor) else None

    # values

    def _root(self, tensor: Tensor) -> tuple[Tensor, int, set[int]]:
        """The tensor whose values these are, the narrowest form on the way in bytes, the storages."""
        width, storages = tensor.element_size(), {storage_key(tensor)}
        while (source := self._same_values(tensor)) is not None:
            tensor = source
            width = min(width, tensor.element_size())
            storages.add(storage_key(tensor))
        return tensor, min(width, self._compute_width(tensor)), storages

    def _same_values(self, tensor: Tensor) -> Tensor | None:
        """What ``tensor`` was made from by a cast, a rearrangement of all its elements or a dropout."""
        op = self.makers.get(id(tensor))
        if id(tensor) in self.activations or id(tensor) in self.norm_outputs:
            return None
        if op is None or op.writes or not op.args or not isinstance(op.args[0], Tensor):
            return None
        source = op.args[0]
        if source is tensor or not source.is_floating_point() or source.numel() != tensor.numel():
            return None
        known = op.name in _SAME_VALUES | _CASTS | _SELECTIONS or op.name == "dropout"
        return source if known else None

    def _compute_width(self, tensor: Tensor) -> int:
        """Bytes of an element in the compute dtype: what an adapter makes of a widened copy of a narrow
        tensor could be as narrow as that tensor."""
        op = self.makers.get(id(tensor))
        if op is None or op.name != "linear" or op.autocast:
            return tensor.element_size()
        return min(tensor.element_size(), self._root(op.args[0])[1])

    def _sources(self, tensor: Tensor) -> list[Tensor]:
        """What a value is recomputed from: itself, x of act(x), or gate and up."""
        root = self._root(tensor)[0]
        product = self._product(root)
        if product is not None:
            return list(product)
        return [self.activations[id(root)]] if id(root) in self.activations else [tensor]

    def _product(self, tensor: Tensor) -> tuple[Tensor, Tensor] | None:
        """gate and up of ``act(gate) * up``."""
        op = self.makers.get(id(tensor))
        if op is None or op.name not in _PRODUCTS or len(op.args) != 2:
            return None
        left, right = op.args
        if (
            not isinstance(left, Tensor)
            or not isinstance(right, Tensor)
            or left.shape != right.shape
        ):
            return None
        for gate, up in ((left, right), (right, left)):
            root = self._root(gate)[0]
            if id(root) in self.activations:
                return self.activations[id(root)], up
        return None

    # items

    def _whole(self, tensor: Tensor) -> Tensor:
        """The norm's output that ``tensor`` is a selection of (it is kept whole), or ``tensor``."""
        root: Tensor | None = tensor
        while root is not None:
            root = self._root(root)[0]
            if id(root) in self.norm_outputs:
                return root
            op = self.makers.get(id(root))
            selects = op is not None and op.name in _SELECTIONS and op.name != "pad"
            source = op.args[0] if op is not None and selects else None
            root = source if isinstance(source, Tensor) else None
        return tensor

    def _keep(self, tensor: Tensor, module: str, kind: str) -> None:
        root, width, storages = self._root(self._whole(tensor))
        if id(root) not in self.items and not storages & self.attention:
            width = min(width, self.widths.get(id(root), width))
            self.items[id(root)] = FloorItem(module, kind, root.numel() * width)

    def _kept(self, tensor: Tensor) -> bool:
        root, _, storages = self._root(tensor)
        return id(root) in self.items or bool(storages & self.attention)

    def _products(self) -> None:
        """Factors of act(gate) * up where no trained matmul reads the product."""
        for op in self.trace.ops:
            product = self._product(op.outputs[0]) if op.outputs else None
            if product is None or not op.outputs[0].requires_grad:
                continue
            gate, up = product
            self._keep(gate, op.module, "activations")
            if gate.requires_grad:
                self._keep(up, op.module, "activations")

    def _dropouts(self, inputs: set[int]) -> None:
        """Masks, for the gradient of the dropout's input and for a matmul that trains behind it."""
        for op in self.trace.ops:
            if op.name != "dropout" or not 0 < dropout_call(op.args, op.kwargs).p < 1:
                continue
            (output,) = op.outputs
            if output.requires_grad or id(output) in inputs:
                size = -(-output.numel() // _FLAGS_PER_BYTE)
                item = FloorItem(op.module, "codes and statistics", size)
                self.items["dropout", id(output)] = item

    def _norm(self, module: str, source: Tensor, output: Tensor) -> None:
        if not self._kept(output) and not self._kept(source):
            self._keep(output, module, "norms")
        if source.requires_grad:
            rows = output.numel() // max(1, output.shape[-1])
            key = ("statistics", id(output))
            self.items[key] = FloorItem(module, "codes and statistics", rows * _STATISTIC)
