"""Inputs of single architectures, which no rule of zoo/feeds.py makes. Tests only."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Made = dict[str, Any]


def _words(rows: int = 2, length: int = 16) -> Tensor:
    return torch.randint(3, 100, (rows, length))


def _with_noise(config: Any) -> Made:
    """The noise that decides what is masked, which float64 would draw differently."""
    patches = (config.image_size // config.patch_size) ** 2
    image = torch.randn(2, config.num_channels, config.image_size, config.image_size)
    return {"pixel_values": image, "noise": torch.rand(2, patches)}


def _tiles(config: Any) -> Made:
    """One image in each row, of one tile."""
    vision = getattr(config, "vision_config", config)
    tiles, size = vision.max_num_tiles, vision.image_size
    return {
        "pixel_values": torch.randn(2, 1, tiles, vision.num_channels, size, size),
        "aspect_ratio_ids": torch.ones(2, 1, dtype=torch.long),
        "aspect_ratio_mask": torch.ones(2, 1, tiles, dtype=torch.long),
    }


def _text_and_tiles(config: Any) -> Made:
    made = _tiles(config)
    seen = torch.ones(2, 16, 1, config.vision_config.max_num_tiles, dtype=torch.long)
    return {"input_ids": _words(), "cross_attention_mask": seen, **made}


def _text_and_images(config: Any) -> Made:
    vision = config.vision_config
    return {
        "input_ids": _words(),
        "pixel_values": torch.randn(2, 1, 3, vision.image_size, vision.image_size),
        "image_attention_mask": torch.ones(2, 16, 1, dtype=torch.long),
    }


def _queried(config: Any, frames: int = 0) -> Made:
    """Text that begins with a token for each query of the image or of each frame."""
    token = getattr(config, "image_token_index", None) or getattr(config, "video_token_index", None)
    size = config.vision_config.image_size
    held = torch.full((2, config.num_query_tokens * max(1, frames)), token)
    return {
        "pixel_values": torch.randn(2, *[frames] * bool(frames), 3, size, size),
        "input_ids": torch.cat((held, _words()), 1),
    }


def _instructed(config: Any, frames: int = 0) -> Made:
    return {**_queried(config, frames), "qformer_input_ids": _words()}


def _clips(config: Any) -> Made:
    size = config.max_img_size
    clips = torch.randn(1, config.num_frames, 3, size, size)  # the model takes no second one
    return {"input_ids": _words(1), "pixel_values": clips}


def _prompted(config: Any) -> Made:
    height, width = config.image_size
    names = ("pixel_values", "prompt_pixel_values", "prompt_masks")
    return {name: torch.randn(2, 3, height // 2, width) for name in names}


def _documents(config: Any) -> Made:
    return {
        "input_ids": _words(),
        "decoder_input_ids": _words(),
        "context_input_ids": _words(4),
        "context_attention_mask": torch.ones(4, 16, dtype=torch.long),
        "doc_scores": torch.rand(2, 2),
        "n_docs": 2,
    }


def _history(config: Any) -> Made:
    length = 2 * config.patch_length
    return {
        "past_values": torch.randn(2, length),
        "past_values_padding": torch.zeros(2, length),
        "freq": torch.zeros(2, 1, dtype=torch.long),
    }


def _labelled_speech(config: Any) -> Made:
    config = getattr(config, "model_config", config)
    return {
        "input_ids": torch.randint(3, min(60, config.vocab_size), (2, 16)),
        "spectrogram_labels": torch.randn(2, 32, config.num_mel_bins),
        "duration_labels": torch.full((2, 16), 2),
        "pitch_labels": torch.randn(2, 16, 1),
        "energy_labels": torch.randn(2, 16, 1),
    }


def _sound_and_clip(config: Any) -> Made:
    return {
        "input_values": torch.randn(2, 1, 6400),
        "pixel_values_videos": torch.randn(2, 2, 3, 64, 64),
    }


def _question(config: Any) -> Made:
    return {
        "input_ids": _words(1),
        "marks": torch.tensor([[5, 9]]),
        "num_options": torch.tensor([[2, 2]]),
        "question_type_ids": torch.tensor([[0, 0]]),
    }


def _denoised(config: Any) -> Made:
    return {
        "hidden_states": torch.randn(2, 32, config.mel_dim),
        "condition_vector": torch.randn(2, 64, config.mel_dim),
        "speaker_embedding": torch.randn(2, 32, config.enc_emb_dim),
        "quantized_code": torch.randint(0, 30, (2, 32 // config.repeats)),
        "time_step": torch.tensor(0.5),
        "apply_cfg": False,
    }


def _maps(width: int, *sides: int) -> list[Tensor]:
    return [torch.randn(2, width, side, side) for side in sides]


def _detection_encoder(config: Any) -> Made:
    width = config.hidden_size
    return {
        "vision_features": _maps(width, 8),
        "text_features": torch.randn(2, 4, width),
        "vision_pos_embeds": _maps(width, 8),
    }


def _detection_decoder(config: Any) -> Made:
    width = config.hidden_size
    return {
        "vision_features": torch.randn(2, 64, width),
        "text_features": torch.randn(2, 4, width),
        "vision_pos_encoding": torch.randn(2, 64, width),
        "spatial_shapes": torch.tensor([[8, 8]]),
    }


def _mask_decoder(config: Any) -> Made:
    width = config.hidden_size
    return {
        "decoder_queries": torch.randn(2, 8, width),
        "backbone_features": _maps(width, 32, 16, 8),
        "encoder_hidden_states": torch.randn(2, 64, width),
        "prompt_features": torch.randn(2, 4, width),
    }


def _speech_states(config: Any) -> Made:
    names = ("input_values", "decoder_input_values")
    return {name: torch.randn(2, 16, config.hidden_size) for name in names}


def _codec(config: Any) -> Made:
    width = config.semantic_model_config.feature_projection_input_dim
    return {"input_values": torch.randn(2, 1, 6400), "input_features": torch.randn(2, 20, width)}


def _images(size: int, count: int = 2) -> Made:
    return {"pixel_values": torch.randn(count, 3, size, size)}


def _classes(config: Any) -> Made:
    ones = torch.ones(4, 8, dtype=torch.long)
    return {
        **_images(64),
        "classes_input_ids": _words(4, 8),
        "classes_attention_mask": ones,
        "tasks_input_ids": _words(2, 8),
        "tasks_attention_mask": ones[:2],
        "classes_structure": torch.tensor([2, 2]),
    }


# keyword arguments of one forward, from the config
FEEDS: dict[str, Callable[[Any], Made]] = {
    "vit_mae": _with_noise,
    "mllama": _text_and_tiles,
    "mllama_vision_model": _tiles,
    "idefics": _text_and_images,
    "blip-2": _queried,
    "instructblip": _instructed,
    "instructblipvideo": lambda config: _instructed(config, 4),
    "tvp": _clips,
    "seggpt": _prompted,
    "rag": _documents,
    "timesfm": _history,
    "fastspeech2_conformer": _labelled_speech,
    "fastspeech2_conformer_with_hifigan": _labelled_speech,
    "pe_audio_video_encoder": _sound_and_clip,
    "jev": _question,
    "qwen2_5_omni_dit": _denoised,
    "sam3_detr_encoder": _detection_encoder,
    "sam3_detr_decoder": _detection_decoder,
    "sam3_mask_decoder": _mask_decoder,
    "sam3_lite_text_detr_encoder": _detection_encoder,
    "sam3_lite_text_detr_decoder": _detection_decoder,
    "sam3_lite_text_mask_decoder": _mask_decoder,
    "speecht5": _speech_states,
    "xcodec2": _codec,
    "neucodec": _codec,
    "perceiver": lambda config: {"inputs": torch.randn(2, 16, config.d_model)},
    "phi4_multimodal_audio": lambda config: {
        "hidden_states": torch.randn(2, 128, config.input_size),
        "mask": None,
    },
    "inkling_audio": lambda config: {
        "audio_input_ids": torch.randint(0, 8, (2, 16, config.n_mel_bins))
    },
    "molmo2_adapter": lambda config: {
        "image_features": torch.randn(2, 16, 2 * config.hidden_size),
        "pooled_patches_idx": torch.arange(32).view(8, 4),
    },
    "molmo2": lambda config: {
        "input_ids": _words(),
        "mm_token_type_ids": torch.zeros(2, 16, dtype=torch.long),
    },
    "moshi_depth": lambda config: {
        "input_ids": torch.randint(3, 100, (2, config.num_codebooks)),
        "last_hidden_state": torch.randn(2, 1, config.input_size),
    },
    "blt_local_decoder": lambda config: {
        "inputs_embeds": torch.randn(2, 16, config.hidden_size),
        "patch_embeds": torch.randn(2, 4, config.hidden_size_global),
    },
    "blt_local_encoder": lambda config: {
        "input_ids": _words(),
        "patch_ids": (torch.arange(16) // 4).expand(2, 16),
        "num_patches": 4,
    },
    "voxtral_realtime_text": lambda config: {
        "input_ids": _words(),
        "t_cond": torch.randn(1, 1, config.hidden_size),
    },
    "fun_asr_nano_encoder": lambda config: {
        "input_features": torch.randn(2, 64, config.input_size),
        "input_features_mask": torch.ones(2, 64, dtype=torch.long),
    },
    "qwen3_asr_encoder": lambda config: {
        "input_features": torch.randn(2, config.num_mel_bins, 4 * config.n_window),
        "input_features_mask": torch.ones(2, 4 * config.n_window, dtype=torch.long),
    },
    "idefics2_perceiver": lambda config: {
        "context": torch.randn(2, 16, config.hidden_size),
        "attention_mask": torch.ones(2, 16, dtype=torch.long),
    },
    "xcodec": lambda config: {"input_values": torch.randn(2, 1, 6400)},
    "omdet-turbo": _classes,
    "oneformer": lambda config: {**_images(64), "task_inputs": _words(2, config.task_seq_len)},
    "depth_pro": lambda config: _images(4 * config.patch_size),
    "janus_vqgan": lambda config: _images(64),
    "xclip_vision_model": lambda config: _images(config.image_size, 2 * config.num_frames),
    "vibevoice_acoustic_tokenizer_encoder": lambda config: {
        "hidden_states": torch.randn(2, 1, 6400)
    },
    "granite_speech5_ctc": lambda config: {
        "input_features": torch.randn(2, 128, 4 * config.encoder_config.num_mel_bins)
    },
    "granite_speech5_encoder": lambda config: {
        "input_features": torch.randn(2, 128, 4 * config.num_mel_bins)
    },
    "muse_glimmer_assistant": lambda config: {
        "noise_embeds": torch.randn(2, 8, config.hidden_size),
        "context_hidden_states": torch.randn(
            2, 16, config.hidden_size * len(config.target_layer_ids)
        ),
    },
}
