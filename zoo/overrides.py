"""What the rules of zoo/shrink.py cannot know of single architectures. Tests only."""

from __future__ import annotations

from typing import Any

__all__ = ["OVERRIDES"]

_NARROW = {
    "width_coefficient": 0.25, "depth_coefficient": 0.25, "hidden_dim": 320, "image_size": 64,
}  # fmt: skip

# ``class`` is the model's, where the first that is listed is another; ``arguments`` go to the config's
# constructor, and ``values`` are set after shrinking (dotted paths)
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
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "hidden_size": 32,
            "n_mamba_heads": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
            "vocab_size": 160,
            "intermediate_size": 48,
        }
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
    "vitmatte": {
        "arguments": {"convstream_hidden_sizes": [8, 16, 32], "fusion_hidden_sizes": [32, 16, 8, 4]}
    },
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
}
