"""Models whose frozen Linears are quantised by other libraries, or as they do it."""

from __future__ import annotations

import copy
import importlib
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from peft.tuners import lora
from torch import Tensor, nn
from torch.nn import functional as F

from tests.support.models import llama_of
from tests.support.step import cast


def in_bits(model: Any, bits: int) -> Any:
    """Frozen, its Linears but heads in bitsandbytes' 4 bits (nf4, doubly quantised) or 8 bits."""
    bitsandbytes = pytest.importorskip("bitsandbytes")
    for name, module in list(model.named_modules()):
        if not isinstance(module, nn.Linear) or "lm_head" in name or "head" in name:
            continue
        sizes, bias = (module.in_features, module.out_features), module.bias
        if bits == 4:
            new = bitsandbytes.nn.Linear4bit(*sizes, bias=bias is not None, quant_type="nf4")
            new.weight = bitsandbytes.nn.Params4bit(
                module.weight.data, requires_grad=False, quant_type="nf4"
            )
        else:
            new = bitsandbytes.nn.Linear8bitLt(
                *sizes, bias=bias is not None, has_fp16_weights=False
            )
            new.weight = bitsandbytes.nn.Int8Params(
                module.weight.data, requires_grad=False, has_fp16_weights=False
            )
        new.bias = bias
        model.set_submodule(name, new)
    return model.to("cpu").requires_grad_(False)


class Int8Weight(Tensor):
    """A weight in 8 bits with a scale for each row, as torchao's: a wrapper, with a function for Linears."""

    codes: Tensor
    scales: Tensor

    @staticmethod
    def __new__(cls, codes: Tensor, scales: Tensor) -> Any:
        make: Any = Tensor._make_wrapper_subclass
        return make(cls, codes.shape, dtype=scales.dtype, device=codes.device)

    def __init__(self, codes: Tensor, scales: Tensor) -> None:
        self.codes, self.scales = codes, scales

    def __tensor_flatten__(self) -> Any:
        return ["codes", "scales"], None

    @classmethod
    def __tensor_unflatten__(cls, inner: Any, _context: Any, _size: Any, _stride: Any) -> Any:
        return cls(inner["codes"], inner["scales"])

    def values(self) -> Tensor:
        return self.codes.to(self.scales.dtype) * self.scales

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.linear:
            return _Product.apply(args[0], args[1])
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten.detach.default, torch.ops.aten.clone.default):
            return cls(func(args[0].codes), func(args[0].scales))
        raise NotImplementedError(f"Int8Weight knows no {func}")


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Any) -> Tensor:
        ctx.save_for_backward(weight)
        return F.linear(x, weight.values())

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0] @ ctx.saved_tensors[0].values(), None


def in_wrappers(model: Any) -> Any:
    """Frozen, its Linears but the head of `Int8Weight`."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and "lm_head" not in name:
            scales = module.weight.detach().abs().amax(1, keepdim=True) / 127
            codes = (module.weight.detach() / scales).round().to(torch.int8)
            wrapper: Any = Int8Weight(codes, scales)
            module.weight = nn.Parameter(wrapper, requires_grad=False)
    return model.requires_grad_(False)


def qlora(kind: str, dtype: torch.dtype = torch.float32, **sizes: Any) -> Any:
    """A small LLaMA of quantised weights (``4bit``, ``8bit`` or ``wrapper``) with LoRA adapters."""
    torch.manual_seed(0)
    model = llama_of(**{"num_hidden_layers": 4, **sizes}).to(dtype)
    model = in_wrappers(model) if kind == "wrapper" else in_bits(model, int(kind[0]))
    options = LoraConfig(
        target_modules="all-linear", r=4, init_lora_weights=False, lora_dropout=0.1
    )
    return get_peft_model(model, options).train()


def with_whole_weights(model: Any) -> Any:
    """A copy in float64 whose Linears of 4 bits have the weights that these stand for."""
    functional: Any = importlib.import_module("bitsandbytes.functional")
    copied = copy.deepcopy(model)
    for name, module in list(copied.named_modules()):
        if hasattr(module, "base_layer"):
            module.__class__ = lora.Linear
        elif type(module).__name__ == "Linear4bit":
            packed, own = module.weight, module.bias
            linear = nn.Linear(module.in_features, module.out_features, bias=own is not None)
            weight = functional.dequantize_4bit(packed.data.view(-1, 1), packed.quant_state)
            linear.weight = nn.Parameter(weight, requires_grad=False)
            if own is not None:
                linear.bias = nn.Parameter(own.detach(), requires_grad=own.requires_grad)
            copied.set_submodule(name, linear)
    return cast(copied, torch.float64)
