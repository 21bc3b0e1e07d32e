"""What each torch function does: the one table of their names, which every other file reads.

A name has the roles that the table gives it, and a name that is not in the table has none. A question
that joins several roles is a union of them: ``CAST | DROPOUT``.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import Any


class Role(enum.Flag):
    """What a torch function does with its first tensor."""

    def has(self, roles: Role) -> bool:
        """Whether one of ``roles`` is among these; six times as fast as ``&``, which matters at each op."""
        return self._value_ & roles._value_ != 0

    # the same elements, in other dimensions or at another place
    RESHAPE = enum.auto()  # all of them in their order, in rows of any length
    UNIT_DIMENSION = enum.auto()  # dimensions of length 1 come or go
    CONTIGUOUS = enum.auto()
    CLONE = enum.auto()
    EXPAND = enum.auto()
    REPEAT = enum.auto()  # as expand, in memory of its own
    CONCATENATION = enum.auto()  # of several tensors
    GATED_HALVES = enum.auto()  # one half of a tensor, times the sigmoid of the other
    ALIAS = enum.auto()  # the same memory, which torch's signatures do not tell
    PERMUTE = enum.auto()  # by a list of dimensions
    TRANSPOSE = enum.auto()  # of two dimensions, which are given
    MOVE_AXES = enum.auto()  # by other arguments
    ROLL = enum.auto()
    FLIP = enum.auto()
    INDEX = enum.auto()
    SELECT = enum.auto()  # along one dimension, which is the first argument
    SPLIT = enum.auto()  # along one dimension, which is the second argument
    UNBIND = enum.auto()  # into all slices; also a SELECT
    PAD = enum.auto()
    DETACH = enum.auto()
    TRANSFER = enum.auto()  # to another device
    CAST = enum.auto()

    # matmuls
    LINEAR = enum.auto()  # of a weight, as a Linear calls it
    GROUPED_MATMUL = enum.auto()  # of the weights of experts
    BATCHED_MATMUL = enum.auto()  # likewise, each of as many rows
    CONVOLUTION = enum.auto()
    MATMUL = enum.auto()  # of any two tensors, as the operator @
    CONTRACTION = enum.auto()  # of any two tensors, otherwise
    FUSED_ATTENTION = enum.auto()
    FLEX_ATTENTION = enum.auto()  # compiled where it trains: no mode of ours stands around it

    SOFTMAX = enum.auto()
    LOG_SOFTMAX = enum.auto()
    LOG_SUM_EXP = enum.auto()
    CROSS_ENTROPY = enum.auto()  # of logits, or of their log_softmax, with labels
    GATHER = enum.auto()
    ARGMAX = enum.auto()
    ROW_NORM = enum.auto()  # a norm over the last dimension
    CHANNEL_NORM = enum.auto()  # a norm over others
    UNIT_ROWS = enum.auto()  # a division by a norm of vectors along one dimension
    RSQRT = enum.auto()  # what a norm calls that is written out
    ACTIVATION = enum.auto()  # what models call an activation: gelu, relu
    SAVES_OUTPUT = enum.auto()  # its derivative is computed from the output, and not from the input
    PRODUCT = enum.auto()
    POWER = enum.auto()
    SUM = enum.auto()
    SUM_IN_PLACE = enum.auto()
    DIVISION = enum.auto()
    NEGATION = enum.auto()
    POINTWISE = enum.auto()  # any other function of each element, or of elements at one place
    FILL = enum.auto()  # one number in the place of some elements
    DROPOUT = enum.auto()

    WRITE = enum.auto()  # into its first tensor, of which it returns nothing
    HOOK = enum.auto()  # waits for the tensor's gradient
    GRADIENT = enum.auto()  # asks autograd for it
    UNTRACKED = enum.auto()  # gives the memory to whoever writes there without a trace
    ADDRESS = enum.auto()  # how a kernel that is no torch op gets at a tensor's memory
    HOLDS_LINEARS = enum.auto()  # products with weights, inside of a larger function
    MEMORY = enum.auto()  # looks at the memory from Python


# fmt: off
_TABLE: tuple[tuple[Role, tuple[str, ...]], ...] = (
    (Role.RESHAPE, ("view", "reshape", "flatten", "unflatten")),
    (Role.UNIT_DIMENSION, ("squeeze", "unsqueeze")),
    (Role.CONTIGUOUS, ("contiguous",)),
    (Role.CLONE, ("clone",)),
    (Role.EXPAND, ("expand", "expand_as")),
    (Role.REPEAT, ("repeat",)),
    (Role.CONCATENATION, ("cat", "concat", "concatenate")),
    (Role.GATED_HALVES, ("glu",)),
    (Role.PERMUTE, ("permute",)),
    (Role.TRANSPOSE, ("transpose", "swapaxes", "swapdims")),
    (Role.MOVE_AXES, ("t", "T", "movedim")),
    (Role.ROLL, ("roll",)),
    (Role.ALIAS, (
        "alias", "H", "mT", "mH", "as_subclass", "atleast_1d", "atleast_2d", "atleast_3d",
        "broadcast_tensors", "meshgrid",
    )),
    (Role.FLIP, ("flip",)),
    (Role.INDEX, ("__getitem__",)),
    (Role.SELECT, ("select", "narrow")),
    (Role.SELECT | Role.UNBIND, ("unbind",)),
    (Role.SPLIT, ("chunk", "split", "tensor_split")),
    (Role.PAD, ("pad", "constant_pad_nd")),
    (Role.DETACH, ("detach", "requires_grad_")),
    (Role.TRANSFER, ("cpu", "cuda")),
    (Role.CAST, ("to", "type_as", "type", "float", "half", "bfloat16", "double")),
    (Role.LINEAR, ("linear", "addmm")),
    (Role.GROUPED_MATMUL, ("grouped_mm", "_grouped_mm")),
    (Role.CONVOLUTION, ("conv1d", "conv2d", "conv3d")),
    (Role.MATMUL, ("matmul", "__matmul__")),
    (Role.CONTRACTION | Role.BATCHED_MATMUL, ("bmm",)),
    (Role.CONTRACTION, ("mm", "baddbmm", "einsum")),
    (Role.FUSED_ATTENTION, ("scaled_dot_product_attention",)),
    (Role.FLEX_ATTENTION, ("flex_attention",)),
    (Role.FUSED_ATTENTION | Role.HOLDS_LINEARS, ("multi_head_attention_forward",)),
    (Role.SOFTMAX, ("softmax",)),
    (Role.LOG_SOFTMAX, ("log_softmax",)),
    (Role.LOG_SUM_EXP, ("logsumexp",)),
    (Role.CROSS_ENTROPY, ("cross_entropy", "nll_loss")),
    (Role.GATHER, ("gather",)),
    (Role.ARGMAX, ("argmax",)),
    (Role.ROW_NORM, ("layer_norm", "rms_norm", "native_layer_norm", "fused_layer_norm")),
    (Role.CHANNEL_NORM, ("group_norm", "batch_norm", "instance_norm")),
    (Role.UNIT_ROWS, ("normalize",)),
    (Role.RSQRT | Role.POINTWISE, ("rsqrt",)),
    (Role.ACTIVATION, (
        "gelu", "silu", "silu_", "softplus", "mish", "elu", "leaky_relu", "hardswish", "hardtanh",
        "hardsigmoid", "logsigmoid", "relu6", "celu", "selu",
    )),
    (Role.ACTIVATION | Role.SAVES_OUTPUT, ("relu", "relu_", "sigmoid", "tanh")),
    (Role.SAVES_OUTPUT, ("sigmoid_", "tanh_", "elu_", "selu_", "celu_")),
    (Role.PRODUCT, ("mul", "__mul__", "__rmul__", "multiply")),
    (Role.POWER, ("square", "pow", "__pow__")),
    (Role.SUM, ("add", "__add__", "__radd__")),
    (Role.SUM_IN_PLACE, ("add_", "__iadd__")),
    (Role.DIVISION, ("div", "__truediv__", "divide", "true_divide")),
    (Role.NEGATION, ("neg", "__neg__", "negative")),
    (Role.POINTWISE, (
        "sub", "subtract", "rsub", "__sub__", "__rsub__", "__rdiv__", "__rtruediv__", "__rpow__",
        "abs", "absolute", "sign", "exp", "exp2", "expm1", "log", "log2", "log1p", "sqrt", "reciprocal",
        "sin", "cos", "atan", "erf", "logit", "softsign", "tanhshrink", "hardshrink", "softshrink",
        "threshold", "clamp", "clip", "clamp_min", "clamp_max", "min", "max", "minimum", "maximum", "where",
        "lerp", "addcmul", "gt", "ge", "lt", "le", "eq", "ne", "greater", "less",
        "__gt__", "__ge__", "__lt__", "__le__", "__eq__", "__ne__", "logical_and", "logical_or",
        "logical_not", "__and__", "__or__", "__invert__", "bitwise_not",
    )),
    (Role.FILL | Role.POINTWISE, ("masked_fill",)),
    (Role.FILL, ("masked_fill_",)),
    (Role.DROPOUT, ("dropout",)),
    (Role.WRITE, ("__setitem__",)),
    (Role.HOOK, ("register_hook", "retain_grad")),
    (Role.GRADIENT, ("grad",)),
    (Role.UNTRACKED, ("data",)),
    (Role.ADDRESS, ("data_ptr", "const_data_ptr", "mutable_data_ptr", "__dlpack__")),
    (Role.MEMORY, ("untyped_storage", "storage", "_typed_storage", "tolist", "numpy", "__array__")),
)
# fmt: on
_ROLES = {name: role for role, names in _TABLE for name in names}
_NONE = Role(0)

# all elements, each once
REARRANGES = (
    Role.RESHAPE | Role.UNIT_DIMENSION | Role.CONTIGUOUS | Role.CLONE | Role.PERMUTE | Role.TRANSPOSE
    | Role.MOVE_AXES | Role.ROLL | Role.DETACH
)  # fmt: skip
SELECTS = Role.INDEX | Role.SELECT | Role.SPLIT | Role.PAD
# these return their very input where there is nothing to do
NEVER_WRITES = REARRANGES | SELECTS | Role.EXPAND | Role.CAST | Role.TRANSFER | Role.DROPOUT
# of each element, or of the elements at one place of several tensors
OF_ELEMENTS = (
    Role.ACTIVATION | Role.PRODUCT | Role.POWER | Role.SUM | Role.DIVISION | Role.NEGATION | Role.POINTWISE
    | Role.CAST
)  # fmt: skip
# what may stand between a head and its loss: logits are moved, cast, scaled, capped and normalised
OF_LOGITS = (
    REARRANGES | SELECTS | Role.CAST | Role.SUM | Role.PRODUCT | Role.DIVISION | Role.ACTIVATION
    | Role.LOG_SOFTMAX
)  # fmt: skip
# what reads a tensor itself, or its gradient: its values cannot wait
NEEDS_TENSOR = Role.HOOK | Role.GRADIENT | Role.UNTRACKED
WEIGHT_MATMULS = Role.LINEAR | Role.GROUPED_MATMUL | Role.CONVOLUTION
MATMULS = Role.MATMUL | Role.CONTRACTION


def role_of(name: str) -> Role:
    """The roles of a torch function by its name, from :func:`function_name`; none where it is unknown."""
    return _ROLES.get(name, _NONE)


def names_with(role: Role) -> frozenset[str]:
    """The names of the functions that have one of these roles, for tables that are read at each call."""
    return frozenset(name for name, own in _ROLES.items() if own.has(role))


def function_name(func: Callable[..., Any]) -> str:
    """``torch.roll`` and ``Tensor.roll`` -> ``roll``; a property's getter -> the property's name."""
    name = getattr(func, "__name__", type(func).__name__)
    if name == "__get__":
        name = getattr(getattr(func, "__self__", None), "__name__", name)
    return str(name)
