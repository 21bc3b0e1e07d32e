"""What queries, keys and values have in common for all tokens, as far as biases and betas tell.

A part that all keys or all values share cancels in attention's gradients. Its rounding does not: a group of
8-bit storage has one scale, which the largest number sets. Where the biases of keys are several times what
the weights make of a token, the gradients of queries and keys have a cosine below 0.999. The biases are those
of the time of the patch.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lowmem_patch.constants import EIGHT_BIT_GROUP
from lowmem_patch.nn.context import is_foreign
from lowmem_patch.strategies.norm_sites import is_norm
from lowmem_patch.strategies.protocol import Facts
from lowmem_patch.tracing.call_arguments import weight_matmul
from lowmem_patch.tracing.dataflow import backward, first_input
from lowmem_patch.tracing.op_roles import REARRANGES, Role
from lowmem_patch.tracing.probes import NormSpec
from lowmem_patch.tracing.saved_bytes import storage_key
from lowmem_patch.tracing.shadow import tensors_in
from lowmem_patch.tracing.trace import Op

# Multiples of what the weights make of a token in a typical channel of a group, beyond which the gradients of
# random models have a cosine below 0.999: of the largest bias, and of the root mean square of values' biases.
_LARGEST, _TYPICAL_OF_VALUES = 4.0, 0.5
_PASSES_ON = REARRANGES | Role.CAST | Role.DROPOUT


class _Linear(NamedTuple):
    """A Linear that made a tensor; ``weight`` is None where it is packed in few bits, which no matmul of
    torch reads."""

    output: Tensor
    module: str
    input: Tensor | None
    weight: Tensor | None
    bias: Tensor | None
    transposed: bool


def common_part(facts: Facts, queries_and_keys: list[Tensor], values: list[Tensor]) -> str | None:
    """Which bias is too large for these to be stored in 8 bits; None where none is known to be."""
    kinds = (queries_and_keys, _LARGEST), (values, _TYPICAL_OF_VALUES)
    for tensor, typical in ((tensor, typical) for tensors, typical in kinds for tensor in tensors):
        for linear in _linears_behind(facts, tensor):
            share = _share(facts, linear, _part(linear.output, tensor))
            if share is not None and (share[0] > _LARGEST or share[1] > typical):
                times = f"{share[0]:.1f} times what the weight of {linear.module} makes of a token"
                return f"a bias, or beta in front, is up to {times}"
    return None


def _linears_behind(facts: Facts, tensor: Tensor) -> Iterator[_Linear]:
    """The last Linears on all ways to ``tensor``."""
    waiting, seen = [tensor], set[int]()
    while waiting:
        op = facts.makers.get(id(waiting.pop()))
        if op is None or id(op) in seen:
            continue
        seen.add(id(op))
        linear = _linear(facts, op)
        if linear is not None:
            yield linear
        else:
            waiting.extend(tensors_in((*op.args, *op.kwargs.values())))


def _linear(facts: Facts, op: Op) -> _Linear | None:
    matmul = weight_matmul(op.name, op.args, op.kwargs) if op.role.has(Role.LINEAR) else None
    output = op.outputs[0] if op.outputs else None
    if output is None or op.role.has(_PASSES_ON):
        return None
    if matmul is not None:
        x, weight, bias, transposed = matmul
        return _Linear(output, op.module, x, weight, bias, transposed)
    bias = facts.modules[op.module]._parameters.get("bias")
    if bias is None or bias.shape != output.shape[-1:] or is_norm(facts, op.module):
        return None
    return _Linear(output, op.module, None, None, bias, False)


def _part(output: Tensor, tensor: Tensor) -> Tensor:
    """The channels of a Linear's output that a tensor shows: some where it is a view, as q, k and v of one
    Linear are, else all."""
    width = output.shape[-1]
    if storage_key(output) != storage_key(tensor):
        return torch.arange(width)
    places = torch.tensor([tensor.storage_offset() % width])
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        if stride < width:
            places = (places[:, None] + stride * torch.arange(size)).flatten()
    return places.unique() % width  # type: ignore[no-any-return, no-untyped-call]  # torch leaves it untyped


def _share(facts: Facts, linear: _Linear, part: Tensor) -> tuple[float, float] | None:
    """The largest part that all outputs have in common, and the root of its mean square, in a group of
    neighbours among the channels ``part``; as multiples of what the weight makes of a token there. None where
    there is none, or parameters are not at hand.
    """
    bias = _values(facts, linear.bias)
    gamma, beta = _affine_before(facts, linear.input)
    if bias is None and beta is None:
        return None  # before a large weight is looked at
    weight = _values(facts, linear.weight)
    typical = None
    if weight is not None:
        here = weight.device
        rows = (weight.T if linear.transposed else weight)[part.to(here)]
        bias = rows.new_zeros(len(part)) if bias is None else bias.to(here)[part.to(here)]
        if beta is not None:
            bias = bias + rows @ beta.to(here)
        typical = (rows if gamma is None else rows * gamma.to(here)).norm(dim=1)
    elif bias is not None:
        bias = bias[part.to(bias.device)]
        typical = torch.ones_like(bias)  # of a weight packed in 4 bits: a token makes about 1
    if bias is None or typical is None:
        return None
    shares = []
    groups = (torch.split(values, EIGHT_BIT_GROUP) for values in (bias, typical))
    for own, token in zip(*groups, strict=True):
        scale = token.square().mean().sqrt().clamp_min(torch.finfo(torch.float32).tiny)
        shares.append(torch.stack([own.abs().max(), own.square().mean().sqrt()]) / scale)
    largest, usual = torch.stack(shares).amax(0).tolist()
    return largest, usual


def _values(facts: Facts, tensor: Any) -> Tensor | None:
    """A parameter of the model in float32, where it has numbers that anybody can read."""
    name = facts.trace.parameters.get(id(tensor))
    if name is None or facts.on_meta:
        return None
    value = facts.model.get_parameter(name)
    if is_foreign(value) or value.is_meta or not value.is_floating_point():
        return None
    return value.detach().float()


def _passed_on(op: Op, _: Tensor) -> Tensor | None:
    return first_input(op) if op.role.has(_PASSES_ON) else None


def _affine_before(facts: Facts, x: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """gamma and beta of the norm that made ``x``."""
    if x is None:
        return None, None
    for form in backward(facts.makers, x, _passed_on):
        op = facts.makers.get(id(form))
        spec = None if op is None or op.module not in facts.calls else facts.norm(op.module)
        if op is not None and isinstance(spec, NormSpec) and spec.dim == -1:
            module = facts.modules[op.module]
            gamma, beta = (
                _values(facts, getattr(module, name, None)) if name else None for name in spec.names
            )
            return None if gamma is None else spec.settings.gamma_of(gamma), beta
    return None, None
