"""Build a tiny model that runs: the first of several shrinks and inputs that its forward accepts."""

from __future__ import annotations

import copy
import dataclasses
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from lowmem_patch.tracing.inputs import ExampleInputs
from zoo.catalog import config_class_of, model_class_of
from zoo.feeds import feeds
from zoo.result import TEXT_ALONE
from zoo.senses import lacks_senses
from zoo.shrink import shrunk_configs, supply

LARGEST = 40_000_000  # parameters
_STUCK = 3  # kinds of shrinks that fail in the very same words before the others are not tried
_SUPPLIED = 5  # values that a config may lack
_PATIENCE = 20  # seconds of one core after which no other shrink is tried


class NoModel(Exception):
    """No class of the library is a model of this type: it is a part of others."""


class CannotBuild(Exception):
    """No shrink of this type gives a model that the zoo can hold."""


class CannotRun(Exception):
    """It is built, and its forward accepts none of the inputs."""


@dataclasses.dataclass
class Built:
    """A model with inputs that it runs on, and how both were made."""

    name: str
    model: Any
    inputs: ExampleInputs
    shrink: str
    feed: str
    parameters: int


def tensors_of(output: Any) -> list[Tensor]:
    """Floating-point tensors of an output, in order; caches and other objects are passed over.

    Infinities, with which models mask, become 0: they must stand at the same places.
    """
    if isinstance(output, Tensor):
        if not output.is_floating_point() or not output.numel():
            return []
        masked = output.isinf()
        return [output.masked_fill(masked, 0.0) if bool(masked.any()) else output]
    if hasattr(output, "values") and callable(output.values):
        output = list(output.values())
    if isinstance(output, (tuple, list)):
        return [tensor for item in output for tensor in tensors_of(item)]
    return []


def randomise(model: nn.Module, seed: int = 1) -> Any:
    """Gammas away from 1, betas and biases away from 0, nothing random in the forward."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.is_floating_point() and parameter.dim() == 1:
                parameter += 0.5 * torch.rand(parameter.shape, generator=generator) - 0.25
            elif parameter.is_floating_point() and not bool(parameter.any()):
                # zero-initialised projections would hide what lies before them
                parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
    for module in model.modules():
        for key, value in list(vars(module).items()):
            if "drop" in key and isinstance(value, float):
                setattr(module, key, 0.0)
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.p = 0.0
    return model.eval()


def _size(model_class: Any, config: Any) -> int:
    """Parameters, counted on the meta device where the constructor allows, else 0."""
    try:
        with torch.device("meta"):
            model = _make(model_class, config)
    except Exception as error:
        if "meta" not in str(error):
            raise  # as it would with data, after filling gigabytes
        return 0
    return sum(parameter.numel() for parameter in model.parameters())


def _make(model_class: Any, config: Any) -> Any:
    make = getattr(model_class, "_from_config", model_class)
    if _is_text_of(config, model_class):
        config = config.get_text_config()
    for _ in range(_SUPPLIED):
        try:
            return make(config)
        except AttributeError as error:
            if not supply(config, error):
                raise
    return make(config)


def _is_text_of(config: Any, model_class: Any) -> bool:
    """Whether the class takes the config of the text alone inside of this one, as Llama4ForCausalLM does:
    AutoModelForCausalLM gives it that one, too."""
    text = (getattr(config, "sub_configs", None) or {}).get("text_config")
    return text is not None and text is getattr(model_class, "config_class", None)


def build_without_data(model_type: str, class_of: Callable[[str], Any]) -> Any:
    """A model of a model type at the sizes of its config, on the meta device, in train mode.

    Raises:
        LookupError: it has no such class.
    """
    model_class = class_of(model_type)
    config = config_class_of(model_type)()
    if getattr(config, "decoder_start_token_id", 0) is None:  # which labels are shifted behind
        config.decoder_start_token_id = 0
    with torch.device("meta"):
        return _make(model_class, config).train()


def build_transformers(model_type: str, class_of: Callable[[str], Any] = model_class_of) -> Built:
    """A runnable tiny model of a model type, of the class that ``class_of`` names.

    Raises:
        NoModel, CannotBuild, CannotRun: with the reason of the last try.
    """
    try:
        config_class = config_class_of(model_type)
        model_class = class_of(model_type)
    except LookupError as error:
        raise NoModel(str(error)) from error
    except (ImportError, AttributeError) as error:
        raise CannotBuild(f"{type(error).__name__}: {error}") from error
    refused: list[str] = []
    built = False
    text_alone: Built | None = None
    alike: dict[tuple[str, ...], set[str]] = {}
    started = time.process_time()
    for shrink, config in shrunk_configs(model_type, config_class):
        if time.process_time() - started > _PATIENCE:
            refused.append(f"nothing found in {_PATIENCE} s")
            break
        try:
            size = _size(model_class, config)
            if size > LARGEST:
                refused.append(f"{shrink}: {size / 1e6:.0f} million parameters")
                continue
            torch.manual_seed(0)
            model = randomise(_make(model_class, config).float())
        except ImportError as error:
            raise CannotBuild(f"{str(error).strip().splitlines()[0]}") from error
        except Exception as error:  # whatever a foreign constructor raises: the next shrink may do
            refused.append(f"{shrink}: {_short(error)}")
            continue
        parameters = sum(p.numel() for p in model.parameters())
        if parameters > LARGEST:
            refused.append(f"{shrink}: {parameters / 1e6:.0f} million parameters")
            continue
        built = True
        before = len(refused)
        inputs = _runnable(model_type, model, shrink, refused)
        if inputs is not None:
            found = Built(model_type, model, inputs[1], shrink, inputs[0], parameters)
            if not lacks_senses(model, found.inputs.kwargs):
                return found
            # perhaps another shrink takes images as well
            text_alone = text_alone or dataclasses.replace(
                found, feed=f"{found.feed}, {TEXT_ALONE}"
            )
            continue
        causes = tuple(text.partition(": ")[2] for text in refused[before:])
        alike.setdefault(causes, set()).add(shrink.replace(",", " ").split()[0])
        if len(alike[causes]) == _STUCK:
            break  # no matter of size
    if text_alone is not None:
        return text_alone
    reason = refused[0] if refused else "no config can be made"
    raise (CannotRun if built else CannotBuild)(f"{model_class.__name__}: {reason}")


def _runnable(
    model_type: str, model: Any, shrink: str, refused: list[str]
) -> tuple[str, ExampleInputs] | None:
    before = len(refused)
    try:
        for feed, inputs in feeds(model_type, model):
            try:
                torch.manual_seed(0)
                with torch.no_grad():
                    found = tensors_of(copy.deepcopy(model)(*inputs.args, **inputs.kwargs))
            except Exception as error:  # whatever a foreign forward raises
                refused.append(f"{shrink}: {_short(error)}")
                continue
            if not found:
                refused.append(f"{shrink}: its output holds no floating-point tensor")
            elif all(bool(torch.isfinite(tensor).all()) for tensor in found):
                return feed, inputs
            else:
                refused.append(f"{shrink}: its output is not finite")
    except Exception as error:  # the package's own words, before those on the zoo's guesses
        refused.insert(before, f"{shrink}: {_short(error)}")
    return None


def _short(error: Exception) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:200]}"
