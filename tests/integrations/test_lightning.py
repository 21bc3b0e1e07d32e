"""Lightning with the callback: models made early, lazily or of one's own; resume; the report."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from transformers import ViTForImageClassification

from lowmem_patch import patch_model, patch_report
from lowmem_patch.errors import ConfigError, TraceError
from lowmem_patch.integrations import patching
from lowmem_patch.integrations.script import ScriptPatching, run_script
from lowmem_patch.planning.report import find_records
from tests.life.distributed_models import SavedBytes
from tests.support.judge import TOLERANCE, assert_close
from tests.support.models import vit_config

pytest.importorskip("lightning")
import lightning.pytorch as lightning
from lightning.pytorch.strategies import ModelParallelStrategy, SingleDeviceStrategy

from lowmem_patch.integrations import LowmemLightningCallback
from lowmem_patch.integrations.lightning_callback import sharing_gpus

# theirs: few workers, no accelerator, checkpoints that are there already
pytestmark = pytest.mark.filterwarnings("ignore")
CLASSES = 5
STEPS = 4


def build() -> Any:
    """In float64, in which two trainings agree to the last digits or are different."""
    torch.manual_seed(0)
    return ViTForImageClassification(vit_config(num_labels=CLASSES)).double().train()


class Classifier(lightning.LightningModule):  # type: ignore[misc]
    """A model of transformers inside; made at once, in ``configure_model`` or in ``setup``."""

    def __init__(self, made: str = "init") -> None:
        super().__init__()
        self.made = made
        self.losses: list[float] = []
        self.saved = 0
        if made == "init":
            self.model = build()

    def configure_model(self) -> None:
        if self.made == "configure_model" and not hasattr(self, "model"):
            self.model = build()

    def setup(self, stage: str) -> None:
        if self.made == "setup":
            self.model = build()

    def training_step(self, batch: Any, _: int) -> Any:
        pixels, labels = batch
        with SavedBytes(self.model) as saved:
            logits = self.model(pixel_values=pixels).logits
        self.saved = self.saved or saved.count
        loss = nn.functional.cross_entropy(logits, labels)
        self.losses.append(float(loss.detach()))
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Own(lightning.LightningModule):  # type: ignore[misc]
    """Nothing of any library inside."""

    def __init__(self, *, example: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm, self.up, self.act, self.down = (
            nn.LayerNorm(8), nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 2),
        )  # fmt: skip
        self.double()
        if example:
            self.example_input_array = torch.zeros(3, 8, dtype=torch.float64)
        self.losses: list[float] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.down(self.act(self.up(self.norm(x))))
        return out

    def training_step(self, batch: Any, _: int) -> Any:
        loss = self(batch[0]).square().mean()
        self.losses.append(float(loss.detach()))
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def batches(*shape: int, dtype: torch.dtype = torch.float64) -> Any:
    generator = torch.Generator().manual_seed(7)
    count = 2 * STEPS
    inputs = torch.randn(count, *shape, generator=generator, dtype=torch.float64).to(dtype)
    labels = torch.randint(CLASSES, (count,), generator=generator)
    return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(inputs, labels), batch_size=2)


def trainer_of(folder: Path, preset: Any = None, **settings: Any) -> Any:
    callbacks = [] if preset is None else [LowmemLightningCallback(preset)]
    return lightning.Trainer(
        default_root_dir=str(folder), accelerator="cpu", devices=1, max_steps=STEPS, logger=False,
        callbacks=callbacks, enable_progress_bar=False, enable_model_summary=False, **settings,
    )  # fmt: skip


def fitted(folder: Path, module: Any, preset: Any = None, data: Any = None, **settings: Any) -> Any:
    data = batches(3, 32, 32) if data is None else data
    trainer_of(folder, preset, **settings).fit(module, data)
    return module


def assert_same(found: Any, expected: Any) -> None:
    assert len(found.losses) == len(expected.losses) == STEPS
    assert_close(torch.tensor(found.losses), torch.tensor(expected.losses), "losses")
    for (name, ours), theirs in zip(found.named_parameters(), expected.parameters(), strict=True):
        assert_close(ours, theirs, name, 10 * TOLERANCE)


@pytest.mark.parametrize("made", ["init", "configure_model", "setup"])
def test_exact_trains_as_the_unpatched_model(tmp_path: Path, made: str) -> None:
    expected = fitted(tmp_path, Classifier(made))
    found = fitted(tmp_path, Classifier(made), "exact")
    assert_same(found, expected)
    by_hand = patch_model(build(), "exact")
    with SavedBytes(by_hand) as saved:
        by_hand(pixel_values=next(iter(batches(3, 32, 32)))[0])
    assert found.saved == saved.count < expected.saved
    assert patch_report(found).patched


def test_the_report_lies_beside_the_checkpoints(tmp_path: Path) -> None:
    found = fitted(tmp_path, Classifier(), "exact")
    data = json.loads((tmp_path / "checkpoints" / "lowmem_patch.json").read_text())
    assert list((tmp_path / "checkpoints").glob("*.ckpt"))
    assert data["models"][0]["saved_after"] == patch_report(found).saved_after


def test_lightning_logs_what_was_done(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", logger="lightning.pytorch.utilities.rank_zero"):
        fitted(tmp_path, Classifier(), "auto")
    assert "lowmem-patch: ViTForImageClassification, preset auto: 7 of 7 sites" in caplog.text


@pytest.mark.parametrize("presets", [("exact", "exact"), ("exact", None), (None, "exact")])
def test_resumes_from_a_checkpoint_of_either_kind(tmp_path: Path, presets: Any) -> None:
    def in_two_halves(folder: Path, first: Any, second: Any) -> Any:
        half = trainer_of(folder, first)
        half.fit_loop.epoch_loop.max_steps = STEPS // 2
        half.fit(Classifier(), batches(3, 32, 32))
        half.save_checkpoint(folder / "half.ckpt")
        module = Classifier()
        trainer_of(folder, second).fit(
            module, batches(3, 32, 32), ckpt_path=folder / "half.ckpt", weights_only=False
        )
        assert len(module.losses) == STEPS // 2
        return module

    straight = in_two_halves(tmp_path / "own", None, None)
    resumed = in_two_halves(tmp_path / "patched", *presets)
    for (name, ours), theirs in zip(resumed.named_parameters(), straight.parameters(), strict=True):
        assert_close(ours, theirs, name, 10 * TOLERANCE)


def test_a_module_of_ones_own_with_its_example_inputs(tmp_path: Path) -> None:
    data = batches(8)
    expected = fitted(tmp_path, Own(example=True), data=data)
    found = fitted(tmp_path, Own(example=True), "exact", data=data)
    assert_same(found, expected)
    assert [site.name for site in patch_report(found).patched] == ["norm", "act"]


class NeverCopied(lightning.Callback):  # type: ignore[misc]
    """Stands for the data and the logs that hang on a trainer."""

    def __deepcopy__(self, memo: Any) -> Any:
        raise AssertionError("the trainer was copied with the module")


def test_a_module_that_says_nothing_is_refused_with_the_mend(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="pass example_inputs="):
        fitted(tmp_path, Own(example=False), "exact", data=batches(8))
    module, data = Own(example=False), batches(8)
    callback = LowmemLightningCallback(
        "exact", example_inputs=torch.zeros(2, 8, dtype=torch.float64)
    )
    trainer = trainer_of(tmp_path)
    trainer.callbacks.extend([callback, NeverCopied()])
    trainer.fit(module, data)
    assert patch_report(module).patched and module.trainer is trainer


def test_autocast_of_the_trainer_is_that_of_the_report(tmp_path: Path) -> None:
    module = Classifier()
    module.model.float()
    data = batches(3, 32, 32, dtype=torch.float32)
    fitted(tmp_path, module, "exact", data=data, precision="bf16-mixed")
    assert "autocast bfloat16" in patch_report(module).inputs


def test_a_budget_needs_the_rows_of_a_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = trainer_of(tmp_path)
    trainer.callbacks.append(LowmemLightningCallback("exact", fit="24GiB"))
    with pytest.raises(ConfigError, match="does not tell: give batch_size=, or"):
        trainer.fit(Classifier(), batches(3, 32, 32))
    calls: list[Any] = []

    def patch(model: Any, config: Any, *, example_inputs: Any, **more: Any) -> None:
        calls.append((str(example_inputs), more))
        patch_model(model, config)

    monkeypatch.setattr(patching, "patch_model", patch)
    trainer = trainer_of(tmp_path)
    trainer.callbacks.append(LowmemLightningCallback("exact", fit="24GiB", batch_size=2))
    trainer.fit(Classifier(), batches(3, 32, 32))
    assert calls == [("pixel_values 2x3x32x32", {"fit": "24GiB", "accumulation": 1})]


def test_evaluation_alone_patches_nothing(tmp_path: Path) -> None:
    class Evaluated(Classifier):
        def validation_step(self, batch: Any, _: int) -> None:
            self.model(pixel_values=batch[0])

    module = Evaluated()
    trainer_of(tmp_path, "exact").validate(module, batches(3, 32, 32), verbose=False)
    assert not find_records(module)


SCRIPT = """
import torch
from lightning.pytorch import Trainer
from tests.integrations.test_lightning import Classifier, batches
module = Classifier()
Trainer(accelerator="cpu", max_steps=1, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False).fit(module, batches(3, 32, 32))
"""


def test_run_patches_a_lightning_script(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2]))
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "script.py").write_text(SCRIPT)
    run_script(str(tmp_path / "script.py"), [], ScriptPatching("exact", strict=True))
    assert "ViTForImageClassification, preset exact: 7 of 7 sites" in capsys.readouterr().err
    assert (tmp_path / "lowmem_patch.json").exists()


class _Mesh:
    def __init__(self, **sizes: int) -> None:
        self.sizes = sizes

    def __getitem__(self, name: str) -> Any:
        return SimpleNamespace(size=lambda: self.sizes[name])


@pytest.mark.parametrize(("data", "tensor", "expected"), [(4, 1, 4), (1, 1, 1), (2, 2, 1)], ids=str)
def test_a_mesh_says_over_how_many_gpus_a_model_is_sharded(
    data: int, tensor: int, expected: int
) -> None:
    strategy = ModelParallelStrategy()
    strategy._device_mesh = _Mesh(data_parallel=data, tensor_parallel=tensor)
    assert sharing_gpus(strategy) == expected
    assert sharing_gpus(SingleDeviceStrategy()) == 1


def test_a_budget_is_that_of_each_gpu() -> None:
    module, strategy = Classifier(), ModelParallelStrategy()
    strategy._device_mesh = _Mesh(data_parallel=4, tensor_parallel=1)
    trainer = SimpleNamespace(strategy=strategy, precision="32", accumulate_grad_batches=1)
    callback = LowmemLightningCallback("exact", fit="1GiB", batch_size=2)
    callback.setup(trainer, module, "fit")
    found = patch_report(module.model).fit
    assert found is not None and found.notes[-1].startswith("bytes are those of one of 4 GPUs")


class _Process:
    """A trainer without checkpoints, in one of several processes; counts who asks for its folder."""

    checkpoint_callback = None

    def __init__(self, folder: Path, *, first: bool) -> None:
        self.folder, self.is_global_zero, self.asked = folder, first, 0

    @property
    def log_dir(self) -> str:
        """Lightning's is broadcast: a process that asks alone waits forever."""
        self.asked += 1
        return str(self.folder)


@pytest.mark.parametrize("first", [True, False])
def test_every_process_asks_for_the_folder_and_one_writes(first: bool, tmp_path: Path) -> None:
    module, trainer = Classifier(), _Process(tmp_path, first=first)
    patch_model(module.model)
    LowmemLightningCallback().on_fit_start(trainer, module)
    assert trainer.asked == 1
    assert (tmp_path / "lowmem_patch.json").exists() == first
