"""eight bit: inputs of Linears that train, and what fused attention reads, are stored in 8 bits; approximate.

A tensor is stored where nobody else would save it in full beside that. Attention reads q, k and v as they
are, and its kernels stay what they are; storing is a pass over each of them beside it. Without them a LLaMA
saves 0.70 of its floor, with them 0.53. They stay in full where a bias is far larger than what it is added to
(`lowmem_patch.strategies.common_parts`).
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Iterator

from torch import Tensor, nn

from lowmem_patch.config import PatchConfig
from lowmem_patch.functional import EIGHT_BIT_DTYPES
from lowmem_patch.nn.eight_bit import store_attention, store_input
from lowmem_patch.nn.norms import MSNorm
from lowmem_patch.nn.own import has_foreign_forward
from lowmem_patch.strategies import gated_norms
from lowmem_patch.strategies.common_parts import common_part
from lowmem_patch.strategies.head import head_names
from lowmem_patch.strategies.lora import adapter_layers
from lowmem_patch.strategies.norm_sites import NormSite, norm_sites
from lowmem_patch.strategies.protocol import Facts, Found, Patch, PatchSite, Target
from lowmem_patch.tracing.base_model import is_leaf
from lowmem_patch.tracing.call_arguments import attention_call
from lowmem_patch.tracing.consumers import Consumer, find_consumers, weight_trains
from lowmem_patch.tracing.op_roles import Role, role_of
from lowmem_patch.tracing.saved_bytes import storage_key


@dataclasses.dataclass(frozen=True)
class StoredInput(Patch):
    """A Linear that trains, or a LoRA layer, whose input is stored in 8 bits.

    Attributes:
        once: a forward reads its weight once.
    """

    strategy = "eight_bit"
    approximate = True

    once: bool = dataclasses.field(default=False, kw_only=True)

    def apply(self, target: Target) -> None:
        store_input(target.model.get_submodule(self.site), once=self.once)


class StoredAttention(Patch):
    """A module whose fused attention stores q, k, v and its output in 8 bits."""

    strategy = "eight_bit"
    approximate = True

    def apply(self, target: Target) -> None:
        store_attention(target.model.get_submodule(self.site))


class StoredNorm(Patch):
    """A norm that shares what such a Linear stores; approximate with it, in whose row a report says so."""

    strategy = "eight_bit"

    def apply(self, target: Target) -> None:
        module = target.model.get_submodule(self.site)
        # a norm that is left alone saves its input, which no Linear reads
        if isinstance(module, MSNorm):
            store_input(module)


def find(facts: Facts, config: PatchConfig) -> Found:
    """Fused attention, the Linears and LoRA layers that train, and the norms in front of them."""
    found = Found()
    if config.storage == "exact":
        return found
    savers = _Savers(facts)
    left = savers.leave_common_parts()
    attention = savers.attention_that_fits()
    gated, in_groups = _gated_norms(facts, config)
    inputs = {
        name: call_inputs
        for name, call_inputs in _trained(facts, config)
        if savers.allow(call_inputs) and not in_groups & set(map(storage_key, call_inputs))
    }
    for name in attention:
        found.add(StoredAttention(name, reason=savers.reason(name), kind="attention"))
    readers = _readers(facts)
    for name in inputs:
        once = readers[id(getattr(facts.modules[name], "weight", None))] == 1
        found.add(StoredInput(name, reason="input stored in 8 bits", kind="linear", once=once))
    norms = [site for site in norm_sites(facts, config) if isinstance(site, NormSite)]
    for site in (*(norm for norm in norms if norm.function is None), *gated):
        if _is_read_by(site.consumers, inputs):
            found.add(StoredNorm(site.name))
    if found.patches:
        found.notes.append(_note(len(attention), len(inputs)))
    if left:
        found.notes.append(
            f"what attention saves stays in full in {len(left)} modules, as in {left[0][0]}: {left[0][1]}, "
            "and the rounding of 8 bits would not cancel in the gradients"
        )
    return found


def _gated_norms(facts: Facts, config: PatchConfig) -> tuple[list[PatchSite], set[int]]:
    """Of gated norms whose output a Linear saves those that save it as well; and keys of the storages of
    those that save z, of which the Linear computes it again."""
    whole: list[PatchSite] = []
    in_groups: set[int] = set()
    for patch in gated_norms.find(facts, config).patches:
        outputs = facts.outputs(patch.site)
        if patch.spec.gate_first and patch.spec.groups == 1:
            consumers = find_consumers(facts.trace, outputs)
            whole.append(PatchSite(patch.site, patch.kind, consumers))
        elif patch.spec.gate_first:
            in_groups.update(map(storage_key, outputs))
    return whole, in_groups


def _readers(facts: Facts) -> Counter[int]:
    """How often a forward calls modules with a weight, by the weight's id."""
    calls: Counter[int] = Counter()
    for name, module in facts.modules.items():
        calls[id(getattr(module, "weight", None))] += len(facts.calls.get(name, ()))
    return calls


def _note(attention: int, linears: int) -> str:
    parts = [f"the inputs of {linears} Linears"] if linears else []
    parts += [f"q, k, v and the output of {attention} attentions"] if attention else []
    return f"{' and '.join(parts)} are stored in 8 bits, and gradients are approximate"


class _Savers:
    """Who saves a tensor's memory, in the unpatched forward.

    Attributes:
        attention: tensors that fused attention saves, by the module that runs it.
        given: q, k and v of its calls.
        matmuls: names of modules whose attention has no fused kernel here: with dropout on a CPU.
    """

    def __init__(self, facts: Facts) -> None:
        self.facts, self.savers = facts, facts.savers
        self.attention: dict[str, list[Tensor]] = {}
        self.given: dict[str, list[list[Tensor]]] = {}
        self.matmuls: set[str] = set()
        for op in facts.trace.ops:
            fused = op.name == "scaled_dot_product_attention" and not op.opaque
            module = facts.modules.get(op.module)
            if not fused or module is None or has_foreign_forward(module):
                continue
            if not op.outputs[0].requires_grad or op.module in facts.foreign_kernels:
                continue
            given = [*attention_call(op.name, op.args, op.kwargs)[:3]]
            self.attention.setdefault(op.module, []).extend((*given, *op.outputs))
            self.given.setdefault(op.module, []).append(given)
            if op.outputs[0].device.type == "cpu" and not _is_fused(op.outputs[0]):
                self.matmuls.add(op.module)

    def reason(self, name: str) -> str:
        """What a report says of a module whose attention stores in 8 bits."""
        more = "; attention runs as matmuls here, whose other tensors stay in full"
        return f"q, k, v and the output stored in 8 bits{more if name in self.matmuls else ''}"

    def leave_common_parts(self) -> list[tuple[str, str]]:
        """Drop the modules whose queries, keys or values have too much in common; their names, and why."""
        left = []
        for name, calls in self.given.items():
            keys = [tensor for call in calls for tensor in call[:2]]
            values = [tensor for call in calls for tensor in call[2:]]
            reason = common_part(self.facts, keys, values)
            if reason is not None:
                del self.attention[name]
                left.append((name, reason))
        return left

    def attention_that_fits(self) -> list[str]:
        """Names of the modules whose attention can store what it saves; the others are dropped."""
        kept = {name: tensors for name, tensors in self.attention.items() if self.allow(tensors)}
        self.attention = kept
        return list(kept)

    def allow(self, tensors: Iterable[Tensor]) -> bool:
        """Whether each is saved by Linears that train and by attention, and by nobody else."""
        return all(self._is_stored(tensor) for tensor in tensors)

    def _is_stored(self, tensor: Tensor) -> bool:
        if tensor.dtype not in EIGHT_BIT_DTYPES:
            return False
        for saver in self.savers.get(storage_key(tensor), ()):
            role = role_of(saver.function)
            fused = role.has(Role.FUSED_ATTENTION)
            if fused and saver.module in self.attention:
                continue
            if not saver.weighted or not role.has(Role.LINEAR):
                return False
        return True


def _is_fused(output: Tensor) -> bool:
    """Whether a kernel of attention made it; ``_Grouped`` stands for one of a GPU."""
    name = output.grad_fn.name() if output.grad_fn is not None else ""
    return "ScaledDotProduct" in name or "_Grouped" in name


def _trained(facts: Facts, config: PatchConfig) -> Iterator[tuple[str, list[Tensor]]]:
    """Linears and LoRA layers that train, but the head, with what their calls read."""
    adapted = adapter_layers(facts, config)
    inside = tuple(f"{name}." for name in adapted)
    heads = head_names(facts, config)
    for name in facts.order:
        module = facts.modules[name]
        if name in heads or name.startswith(inside) or has_foreign_forward(module):
            continue
        if name not in adapted and not _is_trained_linear(facts, name, module):
            continue
        inputs = [call.inputs[0] for call in facts.calls[name] if call.inputs]
        if inputs:
            yield name, inputs


def _is_trained_linear(facts: Facts, name: str, module: nn.Module) -> bool:
    """Whether a module without children runs one matmul, of a weight of its own that trains."""
    if not is_leaf(module) or name in facts.foreign_kernels:
        return False
    weight = getattr(module, "weight", None)
    if not isinstance(weight, Tensor) or weight.dim() != 2 or not weight.requires_grad:
        return False
    for call in facts.calls[name]:
        ops = facts.trace.ops[call.first_op : call.last_op]
        if sum(op.role.has(Role.LINEAR) for op in ops) != 1:
            return False
    return True


def _is_read_by(consumers: Iterable[Consumer], linears: Iterable[str]) -> bool:
    """Whether a Linear whose input is stored is among those that read a norm's output."""
    names = set(linears)
    layers = tuple(f"{name}." for name in names)
    return any(
        consumer.linear is not None
        and (consumer.linear.module in names or consumer.text.startswith(layers))
        and (weight_trains(consumer) or consumer.text.startswith(layers))
        for consumer in consumers
    )
