"""What the zoo feeds its models, and the configs that let them run."""

from __future__ import annotations

import math

import pytest
import torch

from tests.support.versions import before
from zoo.build import NoModel, build_transformers, tensors_of
from zoo.catalog import config_class_of
from zoo.run import judge_transformers
from zoo.senses import lacks_senses
from zoo.shrink import shrunk_configs


@pytest.mark.parametrize("model_type", ["llava", "qwen2_vl", "gemma3"])
def test_text_holds_a_token_for_each_feature_of_its_images(model_type: str) -> None:
    built = build_transformers(model_type)
    given = dict(built.inputs.kwargs)
    ids = given.pop("input_ids")
    kinds = [given.pop(name) for name in ("mm_token_type_ids", "token_type_ids") if name in given]
    assert built.feed == "zoo, senses in text" and "pixel_values" in given
    images = ids == built.model.config.image_token_id
    features = built.model.get_image_features(**given).pooler_output
    assert int(images.sum()) == sum(math.prod(part.shape[:-1]) for part in features) > 0
    assert all(torch.equal(kind == 1, images) for kind in kinds)


def test_text_alone_is_told() -> None:
    built = build_transformers("llava")
    given = built.inputs.kwargs
    assert not lacks_senses(built.model, given)
    assert lacks_senses(built.model, {"input_ids": given["input_ids"]})
    clip = build_transformers("clip").model  # it joins its senses behind the text
    assert not lacks_senses(clip, {"input_ids": given["input_ids"]})


@pytest.mark.skipif(before("transformers", "5.7"), reason="a model type of transformers since 5.6")
def test_a_part_of_another_model_is_named_so() -> None:
    with pytest.raises(NoModel, match=r"which is a part of sam$"):
        build_transformers("sam_mask_decoder")
    assert judge_transformers("sam_mask_decoder").status == "no model of its own"


def test_backbones_keep_the_stages_that_are_read() -> None:
    for _, config in shrunk_configs("rt_detr", config_class_of("rt_detr")):
        assert config.backbone_config.out_indices == [2, 3, 4]


def test_windows_hold_whole_groups_of_patches() -> None:
    for _, config in shrunk_configs("qwen2_5_vl_vision", config_class_of("qwen2_5_vl_vision")):
        assert config.window_size % (config.patch_size * config.spatial_merge_size) == 0


def test_masks_of_an_output_are_compared_by_their_places() -> None:
    (found,) = tensors_of({"logits": torch.tensor([2.0, -math.inf, math.nan])})
    assert found[:2].tolist() == [2.0, 0.0] and math.isnan(found[2])
