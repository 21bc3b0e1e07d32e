"""What the rules of zoo/shrink.py cannot know of single architectures. Tests only."""

from __future__ import annotations

from typing import Any

from transformers import SwinConfig


def _inside(path: str, values: dict[str, Any]) -> dict[str, Any]:
    """The same values of a config inside another."""
    return {f"{path}.{name}": value for name, value in values.items()}


_NARROW = {
    "width_coefficient": 0.25, "depth_coefficient": 0.25, "hidden_dim": 320, "image_size": 64,
}  # fmt: skip

# a pyramid of four stages on images of 64 pixels
_HIERA = {
    "image_size": [64, 64], "hidden_size": 16, "embed_dim_per_stage": [16, 32, 64, 128],
    "num_attention_heads_per_stage": [1, 2, 4, 8], "blocks_per_stage": [1, 1, 2, 1],
    "global_attention_blocks": [3], "window_size_per_stage": [2, 2, 2, 2],
    "window_positional_embedding_background_size": [2, 2],
}  # fmt: skip
_PYRAMID = {
    **_inside("backbone_config", _HIERA), "backbone_channel_list": [128, 64, 32, 16],
    "backbone_feature_sizes": [[16, 16], [8, 8], [4, 4]],
}  # fmt: skip
_SWIN = {
    "model_type": "swin", "embed_dim": 16, "depths": [1, 1, 1, 1], "num_heads": [1, 2, 4, 8],
    "window_size": 2, "image_size": 64, "out_indices": [2, 3, 4],
}  # fmt: skip
_ROTARY = {
    "full_attention": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]}
}
_DEPTH_PARTS = ("patch_model_config", "image_model_config", "fov_model_config")

_VISION = {
    "image_size": 32, "patch_size": 8, "hidden_size": 32, "intermediate_size": 48,
    "num_hidden_layers": 2, "num_attention_heads": 4,
}  # fmt: skip
_SCALED = ("scaled by 8",)
_DETECTORS = (
    "rt_detr", "rt_detr_v2", "d_fine", "deimv2", "pp_doclayout_v3", "pp_doclayout_v4", "grounding-dino",
    "mm-grounding-dino",
)  # fmt: skip

# ``class`` is the model's, where the first that is listed is another; ``arguments`` go to the config's
# constructor, ``values`` are set after shrinking (dotted paths), and ``shrinks`` are those to try
OVERRIDES: dict[str, dict[str, Any]] = {
    # a forecast needs its length
    "autoformer": {"arguments": {"prediction_length": 8, "context_length": 16}},
    "informer": {"arguments": {"prediction_length": 8, "context_length": 16}},
    "time_series_transformer": {"arguments": {"prediction_length": 8, "context_length": 16}},
    # the default maps no image token
    "chameleon": {"arguments": {"vocabulary_map": {"<image>": 140}}},
    "emu3": {"arguments": {"vocabulary_map": {"<image>": 140}}},
    # its width follows from its coefficient
    "efficientnet": {"values": _NARROW},
    "align_vision_model": {"values": _NARROW},
    "align": {"values": {f"vision_config.{name}": value for name, value in _NARROW.items()}},
    # timm's own test model in place of one that must be named
    "timm_backbone": {"arguments": {"backbone": "test_resnet"}},
    "timm_wrapper": {"arguments": {"architecture": "test_vit"}},
    "lw_detr": {"arguments": {"projector_scale_factors": [1.0]}},
    "lfm2_moe": {"arguments": {"layer_types": ["conv", "full_attention"], "num_hidden_layers": 2}},
    # heads of this size fill twice the width
    "mamba2": {"arguments": {"hidden_size": 32, "num_heads": 8, "head_dim": 8}},
    # an attention layer among the two that are left
    "bamba": {"arguments": {"attn_layer_indices": [1]}},
    # window of local attention, of which the default pads a short text with rows that see nothing
    "longformer": {"arguments": {"attention_window": 8}},
    "led": {"arguments": {"attention_window": 8}},
    # the listed class takes the decoder's config
    "musicgen": {"class": "MusicgenForConditionalGeneration"},
    "musicgen_melody": {"class": "MusicgenMelodyForConditionalGeneration"},
    # shared attention is tied between two layers at least
    "zamba": {
        "arguments": {
            "num_hidden_layers": 4,
            "hidden_size": 32,
            "n_mamba_heads": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
            "vocab_size": 160,
            "intermediate_size": 48,
        },
        "values": {
            "layers_block_type": ["linear_attention", "hybrid", "linear_attention", "hybrid"]
        },
    },
    "zamba2": {
        "arguments": {
            "num_hidden_layers": 4,
            "layers_block_type": ["mamba", "hybrid", "mamba", "hybrid"],
            "hidden_size": 32,
            "num_attention_heads": 4,
            "n_mamba_heads": 4,
            "mamba_d_state": 16,
            "chunk_size": 16,
            "vocab_size": 160,
            "intermediate_size": 48,
        }
    },
    # values that a config leaves open
    "deepseek_ocr2_text": {"values": {"mlp_layer_types": ["dense", "sparse"]}},
    "deepseek_ocr2": {"values": {"text_config.mlp_layer_types": ["dense", "sparse"]}},
    "blip-2": {"arguments": {"image_token_index": 140}},
    "instructblip": {"arguments": {"image_token_index": 140}},
    "instructblipvideo": {"arguments": {"video_token_index": 140}},
    "minicpm_ocr": {"arguments": {"image_token_id": 140}},
    "minicpmv4_6": {"arguments": {"image_token_id": 140}},
    "minicpmv4_7": {"arguments": {"image_token_id": 140}},
    "shieldgemma2": {"values": {"yes_token_index": 5, "no_token_index": 6}},
    "xmod": {"arguments": {"languages": ["en_XX"], "default_language": "en_XX"}},
    # layers whose states are read
    "vipllava": {"arguments": {"vision_feature_layers": [-2, -1]}},
    "mllama": {
        "values": {
            "text_config.cross_attention_layers": [1],
            "vision_config.intermediate_layers_indices": [0, 1],
            "vision_config.vision_output_dim": 96,
        }
    },
    "mllama_vision_model": {
        "values": {"intermediate_layers_indices": [0, 1], "vision_output_dim": 96}
    },
    "phi4_multimodal_audio": {
        "values": {
            "nemo_conv_channels": 32,
            "ext_pw_out_channel": 32,
            "depthwise_separable_out_channel": 32,
        }
    },
    # patches of an image become tokens by this table
    "aria": {"arguments": {"projector_patch_to_query_dict": {"16": 8}}},
    # positions that multiply to the length of the text
    "reformer": {
        "arguments": {"axial_pos_shape": [4, 4], "axial_pos_embds_dim": [16, 16], "hidden_size": 32}
    },
    # pictures and windows that are not square, or whose sizes hang together
    "vitpose": {"values": {"backbone_config.image_size": [32, 24]}},
    "seggpt": {"arguments": {"image_size": [64, 32], "patch_size": 8}},
    "tvp": {"arguments": {"max_img_size": 64, "visual_prompt_size": 8, "num_frames": 2}},
    "molmo2_vision": {"arguments": {"image_default_input_size": [32, 32], "image_patch_size": 8}},
    "qwen2_5_omni_bigvgan": {"arguments": {"upsample_initial_channel": 128}},
    "gemma4_assistant": {
        "arguments": {
            "text_config": {"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0}
        }
    },
    "dbrx": {"values": {"attn_config.clip_qkv": 8.0}},
    "sam2_hiera_det_model": {"values": _HIERA},
    "sam2_vision_model": {"values": _PYRAMID},
    "sam2": {
        "values": {**_inside("vision_config", _PYRAMID), "prompt_encoder_config.image_size": 64}
    },
    "depth_pro": {
        "values": {
            "patch_size": 32,
            "intermediate_hook_ids": [1, 0],
            **{f"{part}.image_size": 32 for part in _DEPTH_PARTS},
        }
    },
    "omdet-turbo": {
        "arguments": {
            "backbone_config": _SWIN,
            "encoder_in_channels": [32, 64, 128],
            "apply_layernorm_after_vision_backbone": False,
        },
        "values": {"backbone_config": SwinConfig(**_SWIN)},  # unshrunk
    },
    "janus": {"values": {"vq_config.base_channels": 32}},
    "janus_vqgan": {"arguments": {"num_patches": 4, "base_channels": 32}},
    "uvdoc": {
        "arguments": {
            "backbone_config": {"model_type": "uvdoc_backbone", "out_indices": [1, 2, 3, 4, 5, 6]}
        }
    },
    "cohere_compass_text": {"values": {"rope_parameters": _ROTARY}},
    "cohere_compass": {"values": {"text_config.rope_parameters": _ROTARY}},
    "perception_lm": {
        "values": {
            "vision_config.architecture": "test_vit",
            "vision_config.model_args": {"embed_dim": 64, "img_size": [64, 64], "global_pool": ""},
        }
    },
    "granite4_vision": {
        "arguments": {
            "deepstack_layer_map": [[-1, 0]],
            "spatial_target_layers": [1],
            "downsample_rate": "1/2",
            "qformer_config": {"model_type": "blip_2_qformer"},
        }
    },
    "vitmatte": {
        "arguments": {
            "convstream_hidden_sizes": [8, 16, 32],
            "fusion_hidden_sizes": [32, 16, 8, 4],
        },
        "values": {"backbone_config.patch_size": 16},
    },
    "zoedepth": {"shrinks": _SCALED, "values": {"bottleneck_features": 32}},
    "edgetam_vision_model": {"values": {"backbone_channel_list": [192, 48, 32, 32]}},
    "sam": {"values": {"vision_config.output_channels": 32, "vision_config.num_pos_feats": 16}},
    "sam_hq": {
        "values": {
            "vision_config.output_channels": 32,
            "vision_config.num_pos_feats": 16,
            "mask_decoder_config.vit_dim": 32,
        }
    },
    "vits": {"values": {"upsample_initial_channel": 32, "speaking_rate": 8.0}},
    "vjepa2": {"arguments": {"crop_size": 32, "patch_size": 8, "frames_per_clip": 4}},
    "cohere2_vision": {"values": _inside("vision_config", _VISION)},
    # their widths must keep their ratios
    **{name: {"shrinks": _SCALED} for name in _DETECTORS},
}
