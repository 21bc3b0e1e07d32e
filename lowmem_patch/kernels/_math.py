"""Activation formulas in float32 registers.

``COARSE`` asks for the cheap GELU whose error is below the rounding of a bfloat16 result; erf would
otherwise cost more than the memory traffic. ``PRECISE`` asks for full float32 accuracy; the hardware's
exp2 alone loses a bit per doubling of its argument. Constants stand to the right of tensors: Triton's
interpreter cannot multiply them from the left.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from lowmem_patch import constants

LOG2_E = tl.constexpr(1.4426950408889634)
# ln 2 = high + low with so few bits in high that n * high is exact for every exponent n
LN2_HIGH = tl.constexpr(0.693359375)
LN2_LOW = tl.constexpr(-2.12194440e-4)
RSQRT_2 = tl.constexpr(0.7071067811865476)
RSQRT_2PI = tl.constexpr(0.3989422804014327)
QUICK_GELU_SCALE = tl.constexpr(constants.QUICK_GELU_SCALE)
SELU_SCALE = tl.constexpr(constants.SELU_SCALE)
SELU_PRODUCT = tl.constexpr(constants.SELU_SCALE * constants.SELU_ALPHA)
TANH_SCALE = tl.constexpr(constants.TANH_SCALE)
TANH_CUBIC = tl.constexpr(constants.TANH_CUBIC)

# log2(Phi(x) / Phi(-x)) / x as a polynomial in x^2, minimax on |x| < 5 (relative error of Phi: 1.1e-3)
LOGIT_0 = tl.constexpr(1.59227416 * 1.4426950408889634)
LOGIT_1 = tl.constexpr(7.59248456e-2 * 1.4426950408889634)
LOGIT_2 = tl.constexpr(-9.94255426e-4 * 1.4426950408889634)
LOGIT_3 = tl.constexpr(9.20251045e-6 * 1.4426950408889634)

LOG1P_0 = tl.constexpr(0.99994328)
LOG1P_1 = tl.constexpr(-0.49697779)
LOG1P_2 = tl.constexpr(0.30630088)
LOG1P_3 = tl.constexpr(-0.15742713)
LOG1P_4 = tl.constexpr(0.04134727)

# Abramowitz and Stegun 7.1.26, erfc(z) for z >= 0, absolute error 1.5e-7
ERFC_P = tl.constexpr(0.3275911)
ERFC_1 = tl.constexpr(0.254829592)
ERFC_2 = tl.constexpr(-0.284496736)
ERFC_3 = tl.constexpr(1.421413741)
ERFC_4 = tl.constexpr(-1.453152027)
ERFC_5 = tl.constexpr(1.061405429)


# Without PRECISE the hardware's approximations serve, flushing denormals: the guarded forms that
# Triton emits take more instructions than the memory traffic leaves time for. They are NVIDIA's
# assembly, which an AMD GPU has not and Triton's interpreter does not run; what `jit` makes tells
# whether it interprets, in every version.
@triton.jit
def _probe():
    pass


NVIDIA = tl.constexpr(isinstance(_probe, triton.JITFunction) and torch.version.hip is None)


@triton.jit
def product(x, y):
    """x y, rounded before anything is added to it, whatever else a kernel fuses."""
    if NVIDIA:
        return tl.inline_asm_elementwise(
            "mul.rn.f32 $0, $1, $2;", "=f,f,f", [x, y], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        return x * y


@triton.jit
def _exp2_fast(x):
    if NVIDIA:
        return tl.inline_asm_elementwise(
            "ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        return tl.exp2(x)


@triton.jit
def _reciprocal_fast(x):
    if NVIDIA:
        return tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        return 1.0 / x


@triton.jit
def saturated(x, scale, shift):
    """x * scale + shift, rounded once, between 0 and 1; NaN gives 0. NVIDIA's alone."""
    return tl.inline_asm_elementwise(
        "fma.rn.sat.f32 $0, $1, $2, $3;",
        "=f,f,f,f",
        [x, scale, shift],
        dtype=tl.float32,
        is_pure=True,
        pack=1,
    )


@triton.jit
def _exp(x, PRECISE: tl.constexpr):
    # the upper bounds keep inf out of the quotients below
    if PRECISE:
        x = tl.minimum(tl.maximum(x, -104.0), 88.0)
        n = tl.floor(x * LOG2_E + 0.5)
        rest = (x - n * LN2_HIGH) - n * LN2_LOW
        return tl.exp2(rest * LOG2_E) * tl.exp2(n)
    else:
        return _exp2_fast(tl.minimum(x * LOG2_E, 126.0))


@triton.jit
def _reciprocal(x, PRECISE: tl.constexpr):
    if PRECISE:
        return 1.0 / x
    else:
        return _reciprocal_fast(x)


@triton.jit
def _sigmoid(x, PRECISE: tl.constexpr):
    if PRECISE:
        return 1.0 / (1.0 + _exp(-x, PRECISE))
    else:
        # an infinite exponential gives 0 here, so it needs no bound
        return _reciprocal_fast(1.0 + _exp2_fast(-x * LOG2_E))


@triton.jit
def _sigmoid_pair(x, PRECISE: tl.constexpr):
    """s and 1 - s, the latter without cancellation."""
    e = _exp(-x, PRECISE)
    s = _reciprocal(1.0 + e, PRECISE)
    return s, e * s


@triton.jit
def _normal_cdf(x, PRECISE: tl.constexpr, COARSE: tl.constexpr):
    if PRECISE:
        return 0.5 * (1.0 + tl.erf(x * RSQRT_2))
    elif COARSE:
        square = x * x
        logit = x * (((square * LOGIT_3 + LOGIT_2) * square + LOGIT_1) * square + LOGIT_0)
        return _reciprocal_fast(1.0 + _exp2_fast(-logit))
    else:
        return _normal_cdf_and_bell(x)[0]


@triton.jit
def _normal_cdf_and_bell(x):
    """Phi(x) and exp(-x^2 / 2), which one exponential serves."""
    z = tl.abs(x) * RSQRT_2
    t = _reciprocal_fast(1.0 + z * ERFC_P)
    series = ((((t * ERFC_5 + ERFC_4) * t + ERFC_3) * t + ERFC_2) * t + ERFC_1) * t
    bell = _exp2_fast(-(z * z) * LOG2_E)
    tail = 0.5 * series * bell
    return tl.where(x < 0, tail, 1.0 - tail), bell


@triton.jit
def _expm1(x, PRECISE: tl.constexpr):
    """exp(x) - 1 for x <= 0, also near 0, where that difference has no digits."""
    series = 1.0 + x * (1 / 3) * (1.0 + x * (1 / 4) * (1.0 + x * (1 / 5) * (1.0 + x * (1 / 6))))
    near = x + x * x * 0.5 * series
    return tl.where(x > -0.25, near, _exp(x, PRECISE) - 1.0)


@triton.jit
def _log1p(x):
    """log(1 + x) for x >= 0: what 1 + x loses is lost in both, and cancels."""
    sum = 1.0 + x
    return tl.where(sum == 1.0, x, tl.log(sum) * (x / tl.where(sum == 1.0, 1.0, sum - 1.0)))


@triton.jit
def _tanh_and_slope(x, PRECISE: tl.constexpr):
    # far out all is rounded to 1 and 0, and the exponential stays finite
    e = _exp(tl.maximum(-2.0 * tl.abs(x), -80.0), PRECISE)
    reciprocal = _reciprocal(1.0 + e, PRECISE)
    far = (1.0 - e) * reciprocal
    far = tl.where(x < 0, -far, far)
    square = x * x
    near = ((square * (62 / 2835) - 17 / 315) * square + 2 / 15) * square - 1 / 3
    near = x + x * square * near
    return tl.where(tl.abs(x) < 0.25, near, far), 4.0 * e * reciprocal * reciprocal


@triton.jit
def _tanh_fast(x):
    """Relative error 5e-4; NVIDIA's alone."""
    return tl.inline_asm_elementwise(
        "tanh.approx.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
    )


@triton.jit
def _expm1_coarse(x):
    """exp(x) - 1 for x <= 0, from t = tanh(x / 2): 2 t / (1 - t), without cancellation near 0."""
    t = _tanh_fast(x * 0.5)
    return 2.0 * t * _reciprocal_fast(1.0 - t)


@triton.jit
def _coarse(x, KIND: tl.constexpr):
    """h(x) for a bfloat16 result, whose rounding (2e-3) hides the errors, in as few instructions as the
    memory traffic leaves time for. NVIDIA's alone."""
    if KIND == "sigmoid":
        return _sigmoid(x, False)
    elif KIND == "tanh":
        return _tanh_fast(x)
    elif KIND == "elu":
        return _most(x, 0.0) + _expm1_coarse(_least(x, 0.0))
    elif KIND == "selu":
        return _most(x, 0.0) * SELU_SCALE + _expm1_coarse(_least(x, 0.0)) * SELU_PRODUCT
    elif KIND == "softplus":
        # log(1 + e) / e of e in (0, 1] as a polynomial, minimax: relative error 5.7e-5
        e = _exp2_fast(-tl.abs(x) * LOG2_E)
        series = (((e * LOG1P_4 + LOG1P_3) * e + LOG1P_2) * e + LOG1P_1) * e + LOG1P_0
        return _most(x, 0.0) + e * series
    else:
        tl.static_assert(KIND == "mish")
        e = _exp2_fast(_least(x * LOG2_E, 28.0))
        n = e * (e + 2.0)
        return x * (n * _reciprocal_fast(n + 2.0))


@triton.jit
def _least(x, bound):
    """The smaller one; NaN where x is."""
    return tl.minimum(x, bound, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _most(x, bound):
    """The larger one; NaN where x is."""
    return tl.maximum(x, bound, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _piecewise_value(x, KIND: tl.constexpr):
    """h(x) of activations made of polynomials."""
    if KIND == "relu":
        return _most(x, 0.0)
    elif KIND == "relu_squared":
        positive = _most(x, 0.0)
        return positive * positive
    elif KIND == "leaky_relu":
        return _most(x, x * 0.01)
    elif KIND == "relu6":
        return _least(_most(x, 0.0), 6.0)
    else:
        shifted = _least(_most(x + 3.0, 0.0), 6.0) * (1 / 6)
        if KIND == "hardsigmoid":
            return shifted
        else:
            tl.static_assert(KIND == "hardswish")
            return x * shifted


@triton.jit
def _piecewise_slope(x, KIND: tl.constexpr):
    """h'(x) of activations made of polynomials; at the joints the slopes that torch takes."""
    if KIND == "relu":
        return tl.where(x > 0, 1.0, 0.0)
    elif KIND == "relu_squared":
        return 2.0 * tl.where(x < 0, 0.0, x)
    elif KIND == "leaky_relu":
        return tl.where(x > 0, 1.0, 0.01)
    elif KIND == "relu6":
        return tl.where((x > 0) & (x < 6), 1.0, 0.0)
    elif KIND == "hardsigmoid":
        return tl.where((x > -3) & (x < 3), 1 / 6, 0.0)
    else:
        return tl.where(x <= -3, 0.0, tl.where(x < 3, x * (1 / 3) + 0.5, 1.0))


@triton.jit
def selected(dy, slope):
    """dy * slope as torch's functions that select: 0 where the slope is, also of an infinite dy."""
    return tl.where(slope == 0.0, 0.0, dy * slope)


@triton.jit
def times_slope(dy, slope, KIND: tl.constexpr):
    """dy * h'(x), as torch computes it of this activation."""
    if KIND == "relu" or KIND == "relu_squared" or KIND == "relu6" or KIND == "hardsigmoid":
        return selected(dy, slope)
    else:
        return dy * slope


@triton.jit
def _other_activation(x, KIND: tl.constexpr, PRECISE: tl.constexpr):
    """h(x) and h'(x) of the activations that are no product of x and a sigmoid."""
    y, slope = _of_numbers(x, KIND, PRECISE)
    # minimum and maximum of the hardware drop a NaN
    return tl.where(x == x, y, x), tl.where(x == x, slope, x)


@triton.jit
def _of_numbers(x, KIND: tl.constexpr, PRECISE: tl.constexpr):
    if KIND == "sigmoid":
        s, rest = _sigmoid_pair(x, PRECISE)
        return s, s * rest
    elif KIND == "tanh":
        return _tanh_and_slope(x, PRECISE)
    elif KIND == "elu":
        negative = tl.minimum(x, 0.0)
        return (
            tl.where(x > 0, x, _expm1(negative, PRECISE)),
            tl.where(x > 0, 1.0, _exp(negative, PRECISE)),
        )
    elif KIND == "selu":
        negative = tl.minimum(x, 0.0)
        return (
            tl.where(x > 0, x * SELU_SCALE, _expm1(negative, PRECISE) * SELU_PRODUCT),
            tl.where(x > 0, SELU_SCALE, _exp(negative, PRECISE) * SELU_PRODUCT),
        )
    elif KIND == "softplus":
        y = tl.maximum(x, 0.0) + _log1p(_exp(-tl.abs(x), PRECISE))
        return tl.where(x > 20, x, y), tl.where(x > 20, 1.0, _sigmoid(x, PRECISE))
    elif KIND == "mish":
        # tanh(log(1 + e)) = n / (n + 2) with e = exp(x), n = e (e + 2); behind 20 it is 1
        e = _exp(tl.minimum(x, 20.0), PRECISE)
        n = e * (e + 2.0)
        reciprocal = _reciprocal(n + 2.0, PRECISE)
        gate = n * reciprocal
        inner = tl.minimum(x, 20.0)  # its factor is 0 there, where x may be infinite
        return x * gate, gate + 4.0 * inner * e * (1.0 + e) * reciprocal * reciprocal
    else:
        return _piecewise_value(x, KIND), _piecewise_slope(x, KIND)


@triton.jit
def _curved(x, KIND: tl.constexpr, PRECISE: tl.constexpr, COARSE: tl.constexpr):
    """h(x) of activations made of exponentials, as accurate as the result's dtype asks for."""
    if COARSE and NVIDIA:
        return _coarse(x, KIND)
    else:
        return _other_activation(x, KIND, PRECISE)[0]


@triton.jit
def activate(x, KIND: tl.constexpr, PRECISE: tl.constexpr, COARSE: tl.constexpr):
    """h(x)."""
    if KIND == "gelu":
        return x * _normal_cdf(x, PRECISE, COARSE)
    elif KIND == "gelu_tanh":
        u = (x + x * x * x * TANH_CUBIC) * TANH_SCALE
        return x * _sigmoid(2.0 * u, PRECISE)
    elif KIND == "silu":
        return x * _sigmoid(x, PRECISE)
    elif KIND == "quick_gelu":
        return x * _sigmoid(x * QUICK_GELU_SCALE, PRECISE)
    elif (
        KIND == "sigmoid" or KIND == "tanh" or KIND == "elu"
        or KIND == "selu" or KIND == "softplus" or KIND == "mish"
    ):  # fmt: skip
        return _curved(x, KIND, PRECISE, COARSE)
    else:
        return _piecewise_value(x, KIND)


@triton.jit
def activate_and_slope(x, KIND: tl.constexpr, PRECISE: tl.constexpr):
    """h(x) and h'(x). h = x s(u) gives h' = s + x u' s (1 - s)."""
    if KIND == "gelu":
        if PRECISE:
            cdf = _normal_cdf(x, True, False)
            bell = _exp(-0.5 * x * x, True)
        else:
            cdf, bell = _normal_cdf_and_bell(x)
        return x * cdf, cdf + x * (bell * RSQRT_2PI)
    elif KIND == "gelu_tanh":
        u = (x + x * x * x * TANH_CUBIC) * TANH_SCALE
        s, rest = _sigmoid_pair(2.0 * u, PRECISE)
        slope = (1.0 + x * x * (3.0 * TANH_CUBIC)) * (2.0 * TANH_SCALE)
        return x * s, s + x * slope * s * rest
    elif KIND == "silu":
        s, rest = _sigmoid_pair(x, PRECISE)
        return x * s, s * (1.0 + x * rest)
    elif KIND == "quick_gelu":
        s, rest = _sigmoid_pair(x * QUICK_GELU_SCALE, PRECISE)
        return x * s, s * (1.0 + x * QUICK_GELU_SCALE * rest)
    else:
        return _other_activation(x, KIND, PRECISE)
