"""Each verdict of the zoo's judge turns red when that very thing is broken, or it would mean nothing."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lowmem_patch import api
from lowmem_patch.nn import norms
from lowmem_patch.nn.activations import CodesActivation, RecomputedActivation
from lowmem_patch.strategies import fold_weights as fold
from lowmem_patch.tracing.inputs import ExampleInputs
from tests.support import toy_blocks as models
from tests.support import toy_gates as gates
from zoo.build import Built, randomise
from zoo.judge import judge
from zoo.result import Result

Break = Callable[[pytest.MonkeyPatch], None]


def judged(break_it: Break | None = None, model: type[models.TokenModel] = gates.Glu) -> Result:
    network, args = models.built(model)
    randomise(network)
    built = Built(model.__name__, network, ExampleInputs(args), "", "", 0)
    reload = lose_a_gamma if break_it is reloaded else keep
    with pytest.MonkeyPatch.context() as patch:
        if break_it is not None:
            break_it(patch)
        return judge(built, reload)


def keep(model: Any, folder: str) -> Any:
    """A stock model with the patched one's weights, as a checkpoint would give it."""
    stock, _ = models.built(type(model))
    stock.load_state_dict(model.state_dict())
    return stock.eval()


def lose_a_gamma(model: Any, folder: str) -> Any:
    stock = keep(model, folder)
    with torch.no_grad():
        stock.norm.weight.mul_(1.001)
    return stock


def folded_weight(patch: pytest.MonkeyPatch) -> None:
    right = fold.fold_tensors

    def wrong(weight: Any, bias: Any, *args: Any, **kwargs: Any) -> Any:
        new = right(weight, bias, *args, **kwargs)
        return new[0] * 1.001, new[1]

    patch.setattr(fold, "fold_tensors", wrong)


def folded_bias(patch: pytest.MonkeyPatch) -> None:
    right = fold.fold_tensors
    patch.setattr(fold, "fold_tensors", lambda w, b, *a, **k: (right(w, b, *a, **k)[0], b))


def norm_gradient(patch: pytest.MonkeyPatch) -> None:
    normed = norms.MSLayerNorm.normed

    def wrong(self: Any, x: Any, dtype: Any = None) -> Any:
        y = normed(self, x, dtype)
        return y + 1e-4 * (y - y.detach())

    patch.setattr(norms.MSLayerNorm, "normed", wrong)


def activation_gradient(patch: pytest.MonkeyPatch) -> None:
    forward = RecomputedActivation.forward
    patch.setattr(
        RecomputedActivation, "forward", lambda self, x: forward(self, x + 1e-4 * (x - x.detach()))
    )


def codes_gradient(patch: pytest.MonkeyPatch) -> None:
    forward = CodesActivation.forward
    patch.setattr(
        CodesActivation, "forward", lambda self, x: forward(self, x + 1e-4 * (x - x.detach()))
    )


def eval_mode(patch: pytest.MonkeyPatch) -> None:
    forward = norms.MSNorm.forward
    patch.setattr(
        norms.MSNorm,
        "forward",
        lambda self, x: forward(self, x if self.training else x + x**2 / 64),
    )


def bytes_kept(patch: pytest.MonkeyPatch) -> None:
    def greedy(self: Any, x: Tensor, dtype: Any = None) -> Tensor:
        for _ in range(8):
            x = x * torch.ones_like(x)
        return nn.functional.layer_norm(x, x.shape[-1:], self.weight, self.bias, self.eps)

    patch.setattr(norms.MSLayerNorm, "normed", greedy)


def state_dict_key(patch: pytest.MonkeyPatch) -> None:
    def wrong(self: Any, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        nn.Module._save_to_state_dict(self, destination, prefix, keep_vars)
        destination[prefix + "extra"] = torch.zeros(1)

    patch.setattr(norms.MSNorm, "_save_to_state_dict", wrong)


def reloaded(patch: pytest.MonkeyPatch) -> None:
    """Broken by what :func:`judged` passes as ``reload``."""


def undone_module(patch: pytest.MonkeyPatch) -> None:
    undo = api.undo
    kept: list[Any] = []  # so that no copy gets the address of an earlier module

    def wrong(model: nn.Module, *args: Any, **kwargs: Any) -> None:
        undo(model, *args, **kwargs)
        if "norm" in model._modules:
            kept.append(model.norm)
            model.norm = copy.copy(model.norm)

    patch.setattr(api, "undo", wrong)


def undone_function(patch: pytest.MonkeyPatch) -> None:
    unfold = fold.unfold_tensors

    def wrong(weight: Any, *args: Any, **kwargs: Any) -> Any:
        return unfold(weight * 1.001, *args, **kwargs)

    patch.setattr(fold, "unfold_tensors", wrong)


def raising(patch: pytest.MonkeyPatch) -> None:
    def wrong(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("planted")

    patch.setattr(fold, "fold_tensors", wrong)


# what is broken; the preset that must say so; the first words of what it says
BROKEN: list[tuple[Break, str, str]] = [
    (folded_weight, "paper", "forward"),
    (folded_bias, "paper", "forward"),
    (norm_gradient, "exact", "gradient"),
    (activation_gradient, "exact", "gradient"),
    (codes_gradient, "paper", "gradient"),
    (eval_mode, "exact", "forward"),
    (bytes_kept, "exact", "keeps"),
    (state_dict_key, "auto", "other state-dict keys"),
    (reloaded, "auto", "reload"),
    (undone_module, "exact", "unpatch leaves other modules"),
    (undone_function, "paper", "unpatch"),
    (raising, "paper", "raised PatchError"),
]


def test_nothing_broken_is_right() -> None:
    result = judged()
    assert result.status == "judged"
    assert not result.wrong, result.wrong
    assert {"forward", "gradient", "reload", "unpatch"} <= set(result.presets["auto"].errors)


@pytest.mark.parametrize(
    ("break_it", "preset", "words"), BROKEN, ids=[case[0].__name__ for case in BROKEN]
)
def test_broken_is_wrong(break_it: Break, preset: str, words: str) -> None:
    # what Glu's activation reads is kept anyway, so that it has no codes
    model = models.ParallelBlock if break_it is codes_gradient else gates.Glu
    problems = judged(break_it, model).presets[preset].problems
    assert any(problem.startswith(words) for problem in problems), problems


class Jumping(gates.Glu):
    """What it adds depends on which of several equal scores is the largest: roundings decide."""

    def body(self, x: Tensor) -> Tensor:
        y = super().body(x)
        scores = (y / 3 + y / 7 - y * (10 / 21)).flatten(1)  # 0 but for rounding
        return y + scores.argmax(-1)[:, None, None] * torch.linspace(0, 1, models.WIDTH).to(y)


def test_jumps_of_the_model_itself_are_not_called_right() -> None:
    result = judged(model=Jumping)
    assert result.status == "judged in part"
    assert not result.wrong, result.wrong
    assert "of forward of the unpatched model" in result.reason
