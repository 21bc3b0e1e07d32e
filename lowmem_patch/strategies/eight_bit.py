"""eight bit: inputs of Linears that train, and what fused attention reads, are stored in 8 bits; approximate.

A tensor is stored where nobody else would save it in full beside that. Attention reads q, k and v as they
are, and its kernels stay what they are; storing is a pass over each of them beside it. Without them a LLaMA
saves 0.70 of its floor, with them 0.53. They stay in full where a bias is far larger than what it is added to
(`lowmem_patch.strategies.common_parts`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from functools import partial

from torch import Tensor, nn

from lowmem_patch.config import PatchConfig
from lowmem_patch.functional import EIGHT_BIT_DTYPES
from lowmem_patch.nn.eight_bit import store_attention, store_input
from lowmem_patch.nn.norms import MSNorm
from lowmem_patch.nn.own import has_foreign_forward
from lowmem_patch.strategies import gated_norms
from lowmem_patch.strategies.common_parts import common_part
from lowmem_patch.strategies.head import head_names
from lowmem_patch.strategies.lora import adapter_layers, inside_adapters
from lowmem_patch.strategies.norm_sites import NormSite, PatchSite, norm_sites
from lowmem_patch.strategies.protocol import Change, Facts, Found
from lowmem_patch.strategies.scales import scaled_outputs
from lowmem_patch.tracing.base_model import is_leaf
from lowmem_patch.tracing.call_arguments import attention_call
from lowmem_patch.tracing.consumers import Consumer, find_consumers, weight_trains
from lowmem_patch.tracing.op_roles import Role, role_of
from lowmem_patch.tracing.saved_bytes import storage_key

_AS_MATMULS = "; attention runs as matmuls here, whose other tensors stay in full"


def _store_output(module: nn.Module) -> None:
    """Let a norm share what such a Linear stores; in whose row a report says that it is approximate."""
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
    norms, in_groups = _norms(facts, config)
    inputs = {
        name: call_inputs
        for name, call_inputs in _trained(facts, config)
        if savers.allow(call_inputs) and not in_groups & set(map(storage_key, call_inputs))
    }
    stored = partial(Change, strategy="eight_bit", approximate=True)
    for name in attention:
        reason = f"q, k, v and the output stored in 8 bits{_AS_MATMULS if name in savers.matmuls else ''}"
        found.add(stored(name, change=store_attention, reason=reason, kind="attention"))
    weights = {name: id(getattr(facts.modules[name], "weight", None)) for name in facts.calls}
    readers = Counter(weights[call.name] for call in facts.trace.calls)
    for name in inputs:
        once = readers[weights[name]] == 1
        change = partial(store_input, once=once)
        found.add(stored(name, change=change, reason="input stored in 8 bits", kind="linear"))
    for site in norms:
        if _is_read_by(site.consumers, inputs):
            found.add(Change(site.name, "eight_bit", _store_output))
    if found.patches:
        found.notes.append(_note(len(attention), len(inputs)))
    if left:
        found.notes.append(
            f"what attention saves stays in full in {len(left)} modules, as in {left[0][0]}: {left[0][1]}, "
            "and the rounding of 8 bits would not cancel in the gradients"
        )
    return found


def _norms(facts: Facts, config: PatchConfig) -> tuple[list[PatchSite], set[int]]:
    """Norms, those with a gate among them that save their output as a Linear does; and keys of the storages
    of outputs of such as save z, of which the Linear computes it again."""
    norms = [site for site in norm_sites(facts, config) if isinstance(site, NormSite)]
    whole: list[PatchSite] = [norm for norm in norms if norm.function is None]
    in_groups: set[int] = set()
    for patch in gated_norms.find(facts, config).patches:
        outputs = facts.outputs(patch.site)
        if patch.spec.gate_first and patch.spec.groups == 1:
            consumers = find_consumers(facts.trace, outputs)
            whole.append(PatchSite(patch.site, patch.kind, consumers))
        elif patch.spec.gate_first:
            in_groups.update(map(storage_key, outputs))
    return whole, in_groups


def _note(attention: int, linears: int) -> str:
    parts = [f"the inputs of {linears} Linears"] if linears else []
    parts += [f"q, k, v and the output of {attention} attentions"] if attention else []
    return f"{' and '.join(parts)} are stored in 8 bits, and gradients are approximate"


class _Savers:
    """Who saves a tensor's memory, in the unpatched forward.

    Attributes:
        attention: tensors that fused attention saves, by the module that runs it.
        given: q and k of its calls, and v.
        matmuls: names of modules whose attention has no fused kernel here: with dropout on a CPU.
    """

    def __init__(self, facts: Facts) -> None:
        self.facts = facts
        self.attention: dict[str, list[Tensor]] = {}
        self.given: dict[str, tuple[list[Tensor], list[Tensor]]] = {}
        self.matmuls: set[str] = set()
        for op in facts.trace.ops:
            fused = op.name == "scaled_dot_product_attention" and not op.opaque
            module = facts.modules.get(op.module)
            if not fused or module is None or has_foreign_forward(module):
                continue
            if not op.outputs[0].requires_grad or op.module in facts.foreign_kernels:
                continue
            q, k, v = attention_call(op.name, op.args, op.kwargs)[:3]
            self.attention.setdefault(op.module, []).extend((q, k, v, *op.outputs))
            queries_and_keys, values = self.given.setdefault(op.module, ([], []))
            queries_and_keys += q, k
            values.append(v)
            if op.outputs[0].device.type == "cpu" and not _is_fused(op.outputs[0]):
                self.matmuls.add(op.module)

    def leave_common_parts(self) -> list[tuple[str, str]]:
        """Drop the modules whose queries, keys or values have too much in common; their names, and why."""
        left = []
        for name, given in self.given.items():
            reason = common_part(self.facts, *given)
            if reason is not None:
                del self.attention[name]
                left.append((name, reason))
        return left

    def attention_that_fits(self) -> list[str]:
        """Names of the modules whose attention can store what it saves; the others are dropped."""
        kept = {name: tensors for name, tensors in self.attention.items() if self.allow(tensors)}
        self.attention = kept
        return list(kept)

    def allow(self, tensors: Sequence[Tensor]) -> bool:
        """Whether each is saved by Linears that train and by attention, and by nobody else."""
        return all(tensor.dtype in EIGHT_BIT_DTYPES for tensor in tensors) and all(
            saver.module in self.attention
            if role_of(saver.function).has(Role.FUSED_ATTENTION)
            else saver.weighted and role_of(saver.function).has(Role.LINEAR)
            for saver in self.facts.savers_of(*tensors)
        )


def _is_fused(output: Tensor) -> bool:
    """Whether a kernel of attention made it; ``_Grouped`` stands for one of a GPU."""
    name = output.grad_fn.name() if output.grad_fn is not None else ""
    return "ScaledDotProduct" in name or "_Grouped" in name


def _trained(facts: Facts, config: PatchConfig) -> Iterator[tuple[str, list[Tensor]]]:
    """Linears and LoRA layers that train, with what their calls read; not the head, nor those whose output is
    not saved for the scale behind it."""
    adapted, inside = adapter_layers(facts, config), inside_adapters(facts, config)
    whole = {*head_names(facts, config), *(name for name, _ in scaled_outputs(facts, config))}
    for name in facts.order:
        module = facts.modules[name]
        if name in whole or name.startswith(inside) or has_foreign_forward(module):
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


def _is_read_by(consumers: list[Consumer], linears: Collection[str]) -> bool:
    """Whether a Linear whose input is stored is among those that read a norm's output."""
    layers = tuple(f"{name}." for name in linears)
    return any(
        consumer.text.startswith(layers)
        or (consumer.linear.module in linears and weight_trains(consumer))
        for consumer in consumers
        if consumer.linear is not None
    )
