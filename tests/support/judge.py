"""The judge of the numbers: our error against float64 may be a small factor of the unpatched model's.

| compared | by |
|---|---|
| a patched step and an unpatched one, in the dtype of use | ``assert_same_step``, ``assert_accurate`` |
| the same, where no operation may round otherwise | ``assert_equal_steps``, ``assert_equal`` |
| the same, where both run in float64 | ``assert_same_function``, ``assert_rounded``, ``assert_close`` |
| an op's elements | ``assert_within_budget`` |
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tests.support.step import AUTOCAST, DOUBLE, FP32, Mode, Step, step, truth_of

FORWARD_FACTOR = 2.0
GRADIENT_FACTOR = 3.0
# allowed on top, in eps of the dtype: a value that the unpatched model happens to hit exactly
BAND = 4.0
# of two runs in float64: a wrong value differs by its own size, and sharing loses some digits of z
TOLERANCE = 1e-9
# of weights after a training: AdamW divides by the root of the mean square of a gradient, however small
WEIGHTS_TOLERANCE = 1e-6
# of a weight that was multiplied by gamma and divided by it again in float32, beside its largest value
UNFOLDED = BAND * FP32.eps


# steps in the dtype of use


def assert_outputs(found: Step, unpatched: Step, truth: Step, mode: Mode) -> None:
    """Relative L2 errors against float64: ours at most twice the unpatched model's."""
    assert len(found.outputs) == len(truth.outputs)
    for ours, theirs, exact in zip(found.outputs, unpatched.outputs, truth.outputs, strict=True):
        assert_near(ours, theirs, exact, mode)


def assert_near(ours: Tensor, theirs: Tensor, exact: Tensor, mode: Mode = FP32) -> None:
    """The relative L2 error of one tensor: at most twice the unpatched model's."""
    assert ours.shape == exact.shape
    ours, theirs, exact = (tensor.detach().double() for tensor in (ours, theirs, exact))
    size = float(exact.norm()) or 1.0
    error, own = (float((t - exact).norm()) / size for t in (ours, theirs))
    assert error <= FORWARD_FACTOR * own + BAND * mode.eps, (error, own)


def assert_gradients(found: Step, unpatched: Step, truth: Step, mode: Mode) -> None:
    """Each gradient's error: at most three times the unpatched model's on it, or on all of them.

    A gradient that is 0 in exact arithmetic (a key's bias) is nothing but rounding, so errors are
    measured against at least the model's mean gradient.
    """
    assert set(found.gradients) == set(truth.gradients)
    assert truth.gradients
    errors = {name: unpatched.gradients[name].double() - t for name, t in truth.gradients.items()}
    squares = sum(float(t.square().sum()) for t in truth.gradients.values()) or 1.0
    mean = (squares / sum(t.numel() for t in truth.gradients.values())) ** 0.5
    overall = (sum(float(error.square().sum()) for error in errors.values()) / squares) ** 0.5
    for name, exact in truth.gradients.items():
        size = max(float(exact.norm()), mean * exact.numel() ** 0.5) or 1.0
        error = float((found.gradients[name].double() - exact).norm()) / size
        own = float(errors[name].norm()) / size
        assert error <= GRADIENT_FACTOR * max(own, overall) + BAND * mode.eps, (name, error, own)


def assert_accurate(found: Step, unpatched: Step, truth: Step, mode: Mode = FP32) -> None:
    """Outputs and gradients of one step, against the unpatched model's and float64's."""
    assert_outputs(found, unpatched, truth, mode)
    assert_gradients(found, unpatched, truth, mode)


def assert_same_step(patched: Any, twin: Any, inputs: Any, mode: Mode = FP32) -> None:
    """A patched model and an unpatched one with the same weights: outputs and gradients agree.

    ``twin`` must hold its weights in ``mode``'s dtype already; the truth is ``twin`` in float64.
    """
    truth, own = truth_of(twin, inputs), step(twin, inputs, mode)
    assert_accurate(step(patched, inputs, mode), own, truth, mode)


def assert_same_outputs(patched: Any, twin: Any, inputs: Any, mode: Mode = FP32) -> None:
    """As ``assert_same_step``, without a backward: of models that hold other weights, folded ones."""
    truth = truth_of(twin, inputs, backward=False)
    own, found = (step(model, inputs, mode, backward=False) for model in (twin, patched))
    assert_outputs(found, own, truth, mode)


# steps to the bit


def assert_equal(found: Step, expected: Step) -> None:
    """Every bit of the outputs and of the gradients."""
    assert len(found.outputs) == len(expected.outputs) > 0
    assert all(map(torch.equal, found.outputs, expected.outputs))
    assert set(found.gradients) == set(expected.gradients)
    pairs = [(name, found.gradients[name], g) for name, g in expected.gradients.items()]
    assert [name for name, ours, theirs in pairs if not torch.equal(ours, theirs)] == []


def assert_equal_steps(model: Any, twin: Any, inputs: Any, autocast: bool = False) -> int:
    """Every bit of a step, with hooks and without; returns the bytes that the patch saves."""
    saved, mode = 0, AUTOCAST if autocast else None
    for count in (False, True):
        found, expected = (step(m, inputs, mode, seed=7, count=count) for m in (model, twin))
        saved = expected.saved - found.saved
        assert expected.gradients
        assert_equal(found, expected)
    return saved


# in float64


def assert_close(ours: Tensor, theirs: Tensor, name: str, tolerance: float = TOLERANCE) -> None:
    """Two tensors in float64, or one of them moved by what ``tolerance`` says, of the largest value."""
    ours, theirs = ours.detach(), theirs.detach()
    assert ours.shape == theirs.shape, name
    if theirs.numel():
        error = float((ours - theirs).abs().max())
        assert error <= tolerance * (float(theirs.abs().max()) + 1e-3), (name, error)


def assert_rounded(found: Step, expected: Step, tolerance: float = TOLERANCE) -> None:
    """Outputs and every gradient of two steps in float64."""
    for ours, theirs in zip(found.outputs, expected.outputs, strict=True):
        assert_close(ours, theirs, "output", tolerance)
    assert set(found.gradients) == set(expected.gradients) and expected.gradients
    for name, gradient in expected.gradients.items():
        assert_close(found.gradients[name], gradient, name, tolerance)


def assert_same_function(patched: nn.Module, stock: nn.Module, inputs: Any) -> None:
    """Outputs and every gradient, both models in float64."""
    assert_rounded(step(patched, inputs, DOUBLE), step(stock, inputs, DOUBLE))


def assert_same_parameters(model: nn.Module, stock: nn.Module) -> None:
    """Every parameter is bit-equal, trains as it did, and lies at the same place."""
    named, expected = dict(model.named_parameters()), dict(stock.named_parameters())
    assert list(named) == list(expected)
    for name, parameter in expected.items():
        assert torch.equal(named[name], parameter), name
        assert named[name].requires_grad is parameter.requires_grad, name
    assert list(model.state_dict()) == list(stock.state_dict())


def assert_same_weights(model: nn.Module, stock: nn.Module) -> None:
    """Weights after a training in float64."""
    for (name, ours), theirs in zip(model.named_parameters(), stock.parameters(), strict=True):
        assert_close(ours, theirs, name, WEIGHTS_TOLERANCE)


# the elements of an op


def assert_within_budget(
    ours: Tensor, theirs: Tensor, exact: Tensor, extra: Tensor | float = 0.0
) -> None:
    """Our error is at most twice torch's own error in the same dtype, plus rounding.

    The rounding band is one unit of the result's dtype at each element, and one of float32, in
    which all arithmetic runs, at the scale of the tensor. ``extra`` is what the method itself costs,
    computed from the data.
    """
    assert ours.dtype == theirs.dtype
    assert ours.shape == exact.shape
    if exact.numel() == 0:
        return
    exact = exact.double()
    band = torch.finfo(ours.dtype).eps * exact.abs()
    band = band + torch.finfo(torch.float32).eps * exact.abs().max()
    budget = 2 * ((theirs.double() - exact).abs() + band + extra)
    error = (ours.double() - exact).abs()
    worst = (error - budget).argmax()
    assert bool((error <= budget).all()), (
        f"error {error.flatten()[worst]:.3e} over budget {budget.flatten()[worst]:.3e} "
        f"at value {exact.flatten()[worst]:.6f}"
    )
