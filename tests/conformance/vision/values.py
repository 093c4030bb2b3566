"""Tiny config values by field name, for all vision models."""

from __future__ import annotations

from typing import Any

from conformance.values import HIDDEN, VALUES

VOCAB = 300
IMAGE_ID, START_ID, END_ID, VIDEO_ID, AUDIO_ID = 299, 298, 297, 296, 295
# Random texts have tokens below this one.
TEXT_VOCAB = 250
VISION_HIDDEN, PATCH, SIDE, MERGE = 32, 4, 16, 2


def _all(names: str, value: Any) -> dict[str, Any]:
    return dict.fromkeys(names.split(), value)


TEXT: dict[str, Any] = {
    **VALUES,
    **_all("vocab_size vocab_size_per_layer_input num_vocab", VOCAB),
    **_all("max_position_embeddings max_sequence_length", 4096),
    "rope_scaling": None,
}

VISION: dict[str, Any] = {
    **_all("hidden_size embed_dim width dim d_model enc_dim", VISION_HIDDEN),
    **_all("intermediate_size mlp_dim ff_dim mlp_hidden_dim", 64),
    **_all("num_hidden_layers depth num_layers n_layers layers enc_n_layers", 2),
    **_all("num_attention_heads num_heads n_heads heads enc_n_heads num_key_value_heads", 2),
    **_all("num_channels in_channels in_chans", 3),
    **_all("patch_size enc_patch_size", PATCH),
    **_all("image_size img_size crop_size", SIDE),
    **_all("spatial_merge_size merge_size spatial_patch_size", MERGE),
    "temporal_patch_size": 2,
    **_all("out_hidden_size projection_dim text_hidden_size", HIDDEN),
    "head_dim": 16,
    "mlp_ratio": 2,
    "window_size": 16,
    **_all("fullatt_block_indexes fullatt_block_indices", [1]),
    **_all("deepstack_visual_indexes", [0, 1]),
    **_all("num_position_embeddings num_positions", 64),
    **_all("layer_norm_eps rms_norm_eps norm_eps", 1e-6),
    **_all("init_pos_emb_height init_pos_emb_width", 8),
}

MODEL: dict[str, Any] = {
    **TEXT,
    **_all("image_token_id image_token_index img_context_token_id im_patch_token", IMAGE_ID),
    **_all("media_placeholder_token_id img_id image_patch_id", IMAGE_ID),
    **_all("video_token_id video_token_index", VIDEO_ID),
    **_all("audio_token_id audio_token_index sound_context_token_id", AUDIO_ID),
    **_all("vision_start_token_id image_start_token_id boi_token_id", START_ID),
    **_all("vision_end_token_id image_end_token_id eoi_token_id", END_ID),
    "pad_token_id": 0,
    **_all("mm_hidden_size", VISION_HIDDEN),
    **_all("projection_dim", HIDDEN),
    **_all("downsample_ratio", 0.5),
    "downsample_factor": MERGE,
    "vision_feature_layer": -1,
    "vision_feature_select_strategy": "full",
    "eos_token_id": 1,
}

OTHER: dict[str, Any] = {
    "hidden_size": HIDDEN,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 32,
}
PARTS = {"text": TEXT, "vision": VISION, "perceiver": OTHER, "projector": OTHER, "audio": OTHER}
