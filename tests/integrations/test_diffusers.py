"""diffusers: UNets and transformers are traced on inputs made from their configs, and train the same."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch

from lowmem_patch import patch_model, patch_report, saved_bytes
from lowmem_patch.errors import TraceError
from lowmem_patch.integrations.script import ScriptPatching, run_script
from lowmem_patch.tracing.example_inputs import make_example_inputs
from tests.support.judge import assert_accurate
from tests.support.models import fill_adapters, randomise
from tests.support.step import FP32, bytes_of, step, truth_of

diffusers = pytest.importorskip("diffusers")
peft = pytest.importorskip("peft")

pytestmark = pytest.mark.filterwarnings("ignore")  # theirs: names that will move


def unet(**more: Any) -> Any:
    return diffusers.UNet2DConditionModel(
        sample_size=8, layers_per_block=1, block_out_channels=(16, 32), norm_num_groups=8,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"), cross_attention_dim=24, attention_head_dim=8,
        **more,
    )  # fmt: skip


def transformer(name: str, **sizes: Any) -> Callable[[], Any]:
    return lambda: getattr(diffusers, name)(**sizes)


HEADS = {"num_attention_heads": 2, "attention_head_dim": 16}
MODELS: dict[str, Callable[[], Any]] = {
    "unet": unet,
    "sdxl": lambda: unet(
        addition_embed_type="text_time", addition_time_embed_dim=8, projection_class_embeddings_input_dim=80
    ),
    "classes": lambda: unet(num_class_embeds=7),
    "plain-unet": transformer(
        "UNet2DModel", sample_size=8, block_out_channels=(16, 32), layers_per_block=1, norm_num_groups=8,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"), up_block_types=("AttnUpBlock2D", "UpBlock2D"),
    ),
    "dit": transformer(
        "DiTTransformer2DModel", sample_size=8, in_channels=4, num_layers=1, num_embeds_ada_norm=10, **HEADS
    ),
    "pixart": transformer(
        "PixArtTransformer2DModel", sample_size=8, cross_attention_dim=32, num_layers=1, caption_channels=24,
        **HEADS,
    ),
    "sd3": transformer(
        "SD3Transformer2DModel", sample_size=8, in_channels=4, num_layers=2, joint_attention_dim=24,
        caption_projection_dim=32, pooled_projection_dim=16, out_channels=4, **HEADS,
    ),
    "flux": transformer(
        "FluxTransformer2DModel", in_channels=4, num_layers=1, num_single_layers=1, joint_attention_dim=24,
        pooled_projection_dim=16, axes_dims_rope=(4, 4, 8), guidance_embeds=True, **HEADS,
    ),
    "qwen-image": transformer(
        "QwenImageTransformer2DModel", in_channels=16, out_channels=4, num_layers=1, joint_attention_dim=24,
        axes_dims_rope=(8, 4, 4), **HEADS,
    ),
    "wan": transformer(
        "WanTransformer3DModel", in_channels=4, out_channels=4, text_dim=24, freq_dim=32, ffn_dim=32,
        num_layers=1, **HEADS,
    ),
    "cogvideox": transformer(
        "CogVideoXTransformer3DModel", in_channels=4, out_channels=4, time_embed_dim=8, text_embed_dim=24,
        num_layers=1, sample_width=8, sample_height=8, sample_frames=9, max_text_seq_length=11, **HEADS,
    ),
    "ltx": transformer(
        "LTXVideoTransformer3DModel", in_channels=4, out_channels=4, cross_attention_dim=32, num_layers=1,
        caption_channels=24, **HEADS,
    ),
}  # fmt: skip


def build(name: str, lora: bool) -> Any:
    torch.manual_seed(1)
    model = randomise(MODELS[name]()).train()
    if lora:
        model.requires_grad_(False)
        targets = ["to_q", "to_k", "to_v", "to_out.0"]
        config = peft.LoraConfig(r=4, init_lora_weights="gaussian", target_modules=targets)
        peft.inject_adapter_in_model(config, model)
        fill_adapters(model)
    return model


# The last block's text branch has no reader. A run lets go of what its sums saved, and a trace holds it:
# the report says 2 % more before the patch.
HOLDS_A_BRANCH = pytest.mark.xfail(reason="a trace holds a dropped branch", raises=AssertionError)
MARKS = {
    ("qwen-image", False): [HOLDS_A_BRANCH],
    ("qwen-image", True): [HOLDS_A_BRANCH],
}


@pytest.mark.parametrize(
    ("name", "lora"),
    [
        pytest.param(name, lora, marks=MARKS.get((name, lora), []))
        for name in MODELS
        for lora in (False, True)
    ],
)
def test_exact_is_the_unpatched_model_in_no_more_bytes(name: str, lora: bool) -> None:
    model = build(name, lora)
    twin = copy.deepcopy(model)
    patch_model(model, "exact")
    inputs = make_example_inputs(twin).kwargs
    assert_accurate(step(model, inputs, FP32), step(twin, inputs, FP32), truth_of(twin, inputs))
    report = patch_report(model)
    with saved_bytes(model) as saved:
        model(**inputs)
    before = bytes_of(twin, inputs)
    assert (before, saved.activations) == (report.saved_before, report.saved_after)
    # adapters on attention alone: where no norm is read by a Linear that trains, there is nothing to save
    assert saved.activations < before or (lora and saved.activations == before)


def test_sizes_are_those_of_the_config() -> None:
    inputs = make_example_inputs(unet(), batch_size=3, sequence_length=5)
    assert str(inputs) == "sample 3x4x8x8, timestep 3, encoder_hidden_states 3x5x24"


def test_an_argument_that_no_config_tells_is_asked_for() -> None:
    controlled = diffusers.ControlNetModel(
        block_out_channels=(16, 32), norm_num_groups=8, layers_per_block=1, cross_attention_dim=24,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"), attention_head_dim=8,
    )  # fmt: skip
    with pytest.raises(TraceError, match="pass example_inputs="):
        patch_model(controlled)


SCRIPT = """
import torch
from accelerate import Accelerator
from tests.integrations.test_diffusers import build
accelerator = Accelerator(cpu=True)
model = build("unet", lora=True)
optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
model, optimizer = accelerator.prepare(model, optimizer)
"""


def test_run_patches_a_script_of_accelerates_kind(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    root = __file__.rpartition("/tests/")[0]
    monkeypatch.syspath_prepend(root)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "script.py").write_text(SCRIPT)
    run_script(str(tmp_path / "script.py"), [], ScriptPatching("exact", strict=True))
    assert "at Accelerator.prepare: UNet2DConditionModel, preset exact" in capsys.readouterr().err
