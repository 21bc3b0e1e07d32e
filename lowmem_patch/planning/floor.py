"""The floor: bytes that the rule lets autograd save between forward and backward, from a trace.

The rule (for each token, and nothing else):

1. the input of a matmul whose weight trains: once, in the compute dtype, shared by all its readers.
   Where that input is act(x), act(norm(x) + residual), act(gate) * up, a norm of one of these (also in one
   module) or x.repeat(...) * scores, what it is computed from counts instead, since the input is recomputed;
   a cast made for an adapter, a dropout's result, and rows that experts gather count as their source;
2. what attention itself saves, as the model implements it, but no cast of a softmax's output, and nothing
   that elementwise functions made and others of them save;
3. 2-bit codes of an activation whose input nothing above saves (1 bit where that is exact), statistics of
   a norm's rows, one bit for each element of a dropout, and what no backward can do without: the output of
   a norm that no trained matmul reads, unless attention saves what a rotary embedding made of it, and both
   factors of an act(gate) * up that no trained matmul reads;
4. of a head and a cross entropy of its logits the gradient of the head's input, never logits.

It is counted on the unpatched model, so that it does not depend on what a patch can do.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence

from torch import Tensor

from lowmem_patch.constants import STEP_TABLES
from lowmem_patch.planning import floor_sites
from lowmem_patch.planning.floor_sites import Floor, FloorItem, SiteCall
from lowmem_patch.strategies.cosine_attention import unit_rows
from lowmem_patch.strategies.normed_channels import normed_channels, residual_sums
from lowmem_patch.strategies.protocol import Facts
from lowmem_patch.tracing.call_arguments import dropout_call, weight_matmul
from lowmem_patch.tracing.consumers import gathers_for_a_weight
from lowmem_patch.tracing.dataflow import backward, first_input
from lowmem_patch.tracing.op_roles import (
    MATMULS,
    OF_ELEMENTS,
    REARRANGES,
    SELECTS,
    WEIGHT_MATMULS,
    Role,
    role_of,
)
from lowmem_patch.tracing.saved_bytes import SavedStorage, storage_key
from lowmem_patch.tracing.trace import Op

_CODE_BITS = 2
_BITS: dict[str, int] = {kind: tables[_CODE_BITS].bits for kind, tables in STEP_TABLES.items()}
_FLAGS_PER_BYTE = 8
_MATMULS = WEIGHT_MATMULS | MATMULS
_PART_OF = REARRANGES | SELECTS | Role.CAST
_SAME_VALUES = _PART_OF | Role.DROPOUT  # where no element is lost


def count_floor(facts: Facts) -> Floor:
    """The floor of a traced forward of an unpatched model."""
    return _FloorCount(facts).count()


class _FloorCount:
    def __init__(self, facts: Facts) -> None:
        trace = facts.trace
        self.trace, self.modules = trace, facts.modules
        self.makers = floor_sites.makers_of(trace)
        self.norms, self.activations = floor_sites.find_sites(facts)
        self.gated = floor_sites.gated_norms(facts)
        # with an activation behind, or a sum with another tensor before one
        self.channels, self.sums = normed_channels(facts), residual_sums(facts)
        self.widths: dict[int, int] = {}  # fewest bytes an element that a matmul reads, by root
        self.items: dict[object, FloorItem] = {}
        self.attention: set[int] = set()  # keys of storages
        # ids: what is made of a head's logits, up to their cross entropy
        self.of_logits: set[int] = set()
        # what elementwise functions made is computed again of what they read
        self.elementwise = {
            storage_key(op.outputs[0])
            for op in trace.ops
            if op.role.has(OF_ELEMENTS) and op.outputs
        }
        self.state = facts.state_keys  # the model itself holds it
        self.saved_by: dict[str, list[SavedStorage]] = {}
        for storage in trace.saved.storages:
            for module in dict.fromkeys(saver.module for saver in storage.savers):
                self.saved_by.setdefault(module, []).append(storage)
        self.live = floor_sites.live_ops(trace)
        self.let_go = floor_sites.let_go(trace, self.live)
        self.let_go.update(floor_sites.of_cosine_attention(facts))
        self.unit_rows = [op for op, alone in unit_rows(facts) if alone]
        self.gathered = self._count_gathered()

    def count(self) -> Floor:
        self._attention()
        matmuls = [(op, found) for op in self.live if (found := self._matmul(op)) is not None]
        for op, (x, _) in matmuls:
            width = self._root(x)[1]
            if op.autocast:
                width = min(width, op.outputs[0].element_size())
            self._note_width(x, width)
            # what is held as it is, or what was made of it, which may be narrower
            sources = list(self._sources(x))
            if sum(source.numel() for source in sources) == x.numel():
                for source in sources:
                    self._note_width(source, width)
        for op, (x, weight) in matmuls:
            if weight.requires_grad and op.outputs[0].requires_grad:  # not under no_grad
                for source in self._sources(x):
                    self._add(source, op.module, "linear inputs")
        self._products()
        self._losses()
        self._dropouts({id(x) for _, (x, weight) in matmuls if weight.requires_grad})
        for norm in self.norms.values():
            self._norm(norm)
        self._codes()
        return Floor(tuple(self.items.values()))

    # what the model does

    def _code_bits(self, output: Tensor) -> int:
        """Bits of the codes behind which an activation's output stands: 1 where that is exact."""
        op = self.makers.get(id(output))
        return _CODE_BITS if op is None else _BITS.get(op.name, _CODE_BITS)

    def _attention(self) -> None:
        softmaxes = [
            (storage, saver.module)
            for storage in self.trace.saved.storages
            for saver in storage.savers
            if role_of(saver.function).has(Role.SOFTMAX)
        ]
        for storage in self.trace.saved.storages:
            if storage.category != "attention" or storage.key in self.let_go:
                continue
            alone = all(role_of(saver.function).has(OF_ELEMENTS) for saver in storage.savers)
            if storage.key in self.elementwise and alone:
                continue  # Sinkhorn's steps behind a softmax (DeepSeek-V4)
            softmax = next(
                (pair for pair in softmaxes if floor_sites.is_cast(storage, *pair)), None
            )
            if softmax is not None:
                softmaxes.remove(softmax)
            else:
                item = FloorItem(storage.savers[0].module, "attention", storage.bytes)
                self.items["attention", storage.key] = item
                self.attention.add(storage.key)
        for op in self.unit_rows:
            item = FloorItem(
                op.module, "codes and statistics", floor_sites.statistics_of(op.outputs[0])
            )
            self.items["statistics", id(op.outputs[0])] = item

    def _matmul(self, op: Op) -> tuple[Tensor, Tensor] | None:
        """Input and weight of a matmul of a parameter."""
        if not op.role.has(_MATMULS):
            return None
        known = weight_matmul(op.name, op.args, op.kwargs)
        given = (*op.args, *op.kwargs.values()) if known is None else (known.input, known.weight)
        values = [v for v in given if isinstance(v, Tensor) and v.is_floating_point()]
        if len(values) < 2:
            return None
        x, weight = values[:2]
        if op.role.has(MATMULS) and self._is_parameter(x):
            x, weight = weight, x
        return (x, weight) if op.role.has(WEIGHT_MATMULS) or self._is_parameter(weight) else None

    def _is_parameter(self, tensor: Tensor) -> bool:
        """Whether it is a parameter, a part of one or another form of it."""
        forms = backward(
            self.makers, tensor, lambda op, _: first_input(op) if op.role.has(_PART_OF) else None
        )
        return any(id(form) in self.trace.parameters for form in forms)

    def _wholes(self, tensor: Tensor) -> Iterator[Tensor]:
        """The root of ``tensor``, the root of what that is a selection of, and so on to a norm's output."""
        return backward(self.makers, self._root(tensor)[0], self._selected_from)

    def _selected_from(self, op: Op, root: Tensor) -> Tensor | None:
        source = first_input(op)
        selects = op.role.has(SELECTS) and id(root) not in self.norms
        return self._root(source)[0] if selects and source is not None else None

    def _note_width(self, tensor: Tensor, width: int) -> None:
        """A matmul reads ``tensor``, or a selection of it, with so many bytes an element."""
        for root in self._wholes(tensor):
            self.widths[id(root)] = min(width, self.widths.get(id(root), width))

    # values

    def _root(self, tensor: Tensor) -> tuple[Tensor, int, set[int]]:
        """The tensor whose values these are, the fewest bytes an element on the way, the storages."""
        forms = list(backward(self.makers, tensor, self._same_values))
        width = min(form.element_size() for form in forms)
        return forms[-1], min(width, self._compute_width(forms[-1])), set(map(storage_key, forms))

    def _same_values(self, op: Op, tensor: Tensor) -> Tensor | None:
        """What ``tensor`` was made from by a cast, a rearrangement of all its elements, a dropout or an
        expansion."""
        source = first_input(op)
        if any(id(tensor) in found for found in (self.activations, self.norms, self.gated)):
            return None
        if op.writes or source is None or source is tensor:
            return None
        allowed = _SAME_VALUES if source.numel() == tensor.numel() else Role.EXPAND
        return source if source.is_floating_point() and op.role.has(allowed) else None

    def _compute_width(self, tensor: Tensor) -> int:
        """Bytes of an element in the compute dtype: an adapter that reads a float32 copy of a bf16
        tensor could compute in bf16."""
        op = self.makers.get(id(tensor))
        matmul = None if op is None else weight_matmul(op.name, op.args, op.kwargs)
        if op is None or matmul is None or op.autocast:
            return tensor.element_size()
        return min(tensor.element_size(), self._root(matmul.input)[1])

    def _sources(self, tensor: Tensor) -> list[Tensor]:
        """What a value is recomputed from: itself, x of act(x), or gate and up."""
        root = self._root(tensor)[0]
        norm = self.norms.get(id(root))
        if norm is not None and self._is_of_activation(norm):
            return self._sources(norm.source)
        whole = floor_sites.before_parts(self.makers, root)
        product = self._factors(root, whole)
        if product is not None:
            return [source for factor in product for source in self._before_product(factor)]
        parts = floor_sites.parts_of(self.makers, whole)
        if parts:
            return [source for part in parts for source in self._sources(part)]
        activation = self.activations.get(id(root)) or self._squared_relu(root)
        if activation is None:
            sites = self.activations, self.norms
            return [self._before_site(floor_sites.of_one(self.makers, root, sites))]
        summed = self.sums.get(id(activation.source))
        if summed is not None:
            held = [source for residual in summed.residuals for source in self._sources(residual)]
            return [*(norm.reads[0] for norm in summed.norms), *held]
        return [self._before_channels(activation.source)]

    def _factors(self, root: Tensor, whole: Tensor) -> tuple[Tensor, ...] | None:
        """What a value, or the ``whole`` that it was made of with smaller tensors, is a product or sum of."""
        known = self.gated.get(id(root)) or floor_sites.of_repeated(self.makers, root)
        product = known or self._product(root, by_rows=True) or self._product(whole, by_rows=True)
        if product is None and not self.gathered[id(root)]:  # experts save what they gather of
            term = self._before_numbers(root)
            product = floor_sites.of_residual(self.makers, term, self.norms)
        return product

    def _is_of_activation(self, norm: SiteCall) -> bool:
        """Whether a norm of rows has act(x) or act(gate) * up for its input."""
        source, maker = self._root(norm.source)[0], self.makers.get(id(norm.output))
        if maker is not None and maker.role.has(Role.CHANNEL_NORM):
            return False
        return id(source) in self.activations or self._product(source) is not None

    def _before_product(self, factor: Tensor) -> Sequence[Tensor]:
        inner = self._product(self._root(factor)[0], by_rows=True)
        if inner is None:
            return [self._before_site(factor)]
        return [source for one in inner for source in self._before_product(one)]

    def _before_site(self, tensor: Tensor) -> Tensor:
        """What an activation, and a norm over channels in front of it, made a tensor of."""
        activation = self.activations.get(id(self._root(tensor)[0]))
        before = tensor if activation is None else self._before_numbers(activation.source)
        return self._before_channels(before)

    def _before_channels(self, tensor: Tensor) -> Tensor:
        """The input of the norm over channels that made a tensor, which two norms may have in common."""
        norm = self.channels.get(id(self._root(tensor)[0]))
        return tensor if norm is None else norm.reads[0]

    def _squared_relu(self, tensor: Tensor) -> SiteCall | None:
        """The ReLU of which ``tensor`` is the square."""
        base = floor_sites.square_of(self.makers.get(id(tensor)))
        root = tensor if base is None else self._root(base)[0]
        maker = self.makers.get(id(root))
        return self.activations.get(id(root)) if maker and maker.name == "relu" else None

    def _product(self, tensor: Tensor, by_rows: bool = False) -> tuple[Tensor, ...] | None:
        """gate and up of ``act(gate) * up``, before what a number did to them: GPT-OSS clamps both, and up is
        ``gate * alpha`` as well, which a second product multiplies. ``by_rows``: a gate may have one number
        for a row of up."""
        op = self.makers.get(id(tensor))
        if op is None or not op.role.has(Role.PRODUCT) or len(op.args) != 2:
            return None
        left, right = op.args
        if not (isinstance(left, Tensor) and isinstance(right, Tensor)):
            return None
        for gate, up in ((left, right), (right, left)):
            if up.shape != tensor.shape or not (by_rows or gate.shape == up.shape):
                continue
            root = self._root(gate)[0]
            activation = self.activations.get(id(root))
            found = self._product(root) if activation is None else (activation.source,)
            if found is not None:
                return tuple({id(t): t for t in map(self._before_numbers, (*found, up))}.values())
        return None

    def _before_numbers(self, tensor: Tensor) -> Tensor:
        return floor_sites.before_numbers(self.makers, tensor, (self.activations, self.norms))

    def _whole(self, tensor: Tensor) -> Tensor:
        """The norm's output that ``tensor`` is a selection of (it is saved whole), or ``tensor``; in the
        place of at least as many rows that are gathered of it, what they are gathered of."""
        for root in self._wholes(tensor):
            if id(root) in self.norms:
                return root
            if (op := self.makers.get(id(root))) is not None and op.role.has(Role.PAD):
                break
            source = first_input(op) if op is not None and op.role.has(Role.INDEX) else None
            if source is not None and self.gathered[id(source)] >= source.numel():
                tensor = source
        return tensor

    def _count_gathered(self) -> Counter[int]:
        """Numbers that matmuls gather of a tensor, by its id."""
        found: Counter[int] = Counter()
        for op in self.trace.ops:
            if gathers_for_a_weight(self.trace, op):
                for one in {id(op.args[0]), id(self._root(op.args[0])[0])}:
                    found[one] += op.outputs[0].numel()
        return found

    def _add(self, tensor: Tensor, module: str, category: str) -> None:
        root, width, storages = self._root(self._whole(tensor))
        if id(root) not in self.items and not storages & (self.attention | self.state):
            width = min(width, self.widths.get(id(root), width))
            self.items[id(root)] = FloorItem(module, category, root.numel() * width)

    def _is_saved(self, tensor: Tensor) -> bool:
        root, _, storages = self._root(tensor)
        return id(root) in self.items or bool(storages & self.attention)

    def _products(self) -> None:
        """Factors of act(gate) * up where no trained matmul reads the product."""
        for op in self.trace.ops:
            product = self._product(op.outputs[0]) if op.outputs else None
            if product is not None and op.outputs[0].requires_grad:
                for factor in product if product[0].requires_grad else product[:1]:
                    for source in self._before_product(factor):
                        self._add(source, op.module, "activations")

    def _losses(self) -> None:
        """The gradient of a head's input for each row whose logits a cross entropy reads."""
        for op in self.trace.ops:
            logits = first_input(op)
            if not op.role.has(Role.CROSS_ENTROPY) or logits is None:
                continue
            forms = floor_sites.forms_of_logits(self.makers, logits)
            maker = self.makers.get(id(forms[-1]))
            matmul = None if maker is None else weight_matmul(maker.name, maker.args, maker.kwargs)
            if maker is None or matmul is None or not matmul.input.requires_grad:
                continue
            rows = logits.numel() // maker.outputs[0].shape[-1]
            width = min(self._root(matmul.input)[1], maker.outputs[0].element_size())
            size = rows * matmul.input.shape[-1] * width
            self.items["loss", id(logits)] = FloorItem(maker.module, "head and loss", size)
            self.of_logits.update(map(id, forms))

    def _dropouts(self, inputs: set[int]) -> None:
        """Masks, for the gradient of the dropout's input and for a matmul that trains behind it."""
        for op in self.trace.ops:
            if not op.role.has(Role.DROPOUT) or not 0 < dropout_call(op.args, op.kwargs).p < 1:
                continue
            (output,) = op.outputs
            if output.requires_grad or id(output) in inputs:
                size = -(-output.numel() // _FLAGS_PER_BYTE)
                item = FloorItem(op.module, "codes and statistics", size)
                self.items["dropout", id(output)] = item

    def _codes(self) -> None:
        """Of activations through which an output has a gradient, where nothing above saves the input."""
        live = {id(output) for op in self.live for output in op.outputs}
        for module, source, output, _ in self.activations.values():
            forms = (source, self._before_numbers(source), self._before_channels(source))
            known = any(map(self._is_saved, forms)) or id(output) not in live - self.of_logits
            if source.requires_grad and not (known or id(source) in self.sums):
                size = -(-source.numel() * self._code_bits(output) // 8)
                self.items["codes", id(output)] = FloorItem(module, "codes and statistics", size)

    def _norm(self, norm: SiteCall) -> None:
        output, source = norm.output, norm.source
        held = self.saved_by.get(norm.module, [])
        if not any(math.prod(storage.shape) >= source.numel() for storage in held):
            return  # constants, as those of a frozen batch norm, need no input
        kept = floor_sites.kept_of(self.trace, self.makers, norm)
        seen = any(map(self._is_saved, kept))
        seen = seen or all(map(self._is_saved, self._sources(source)))
        seen = seen or floor_sites.is_for_attention(self.trace, norm, self.attention)
        if not seen and (
            source.requires_grad or floor_sites.gamma_trains(self.modules[norm.module])
        ):
            self._add(kept[0], norm.module, "norms")
        if source.requires_grad and not self._is_of_activation(norm):
            # of a batch norm there are fewer, one for each channel
            own = sum(s.bytes for s in held if math.prod(s.shape) < source.numel())
            size = min(floor_sites.statistics_of(output, norm.dim), own)
            item = FloorItem(norm.module, "codes and statistics", size)
            self.items["statistics", id(output)] = item
