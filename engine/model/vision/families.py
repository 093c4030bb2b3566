"""The types of models whose images are supported, and how mlx-vlm's code of them is called."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, Literal


@dataclass(frozen=True, slots=True)
class Family:
    """How models of a type are called.

    Attributes:
        positions: what the position of a token is: its place in the sequence; M-RoPE by the grids
            of images; M-RoPE with the same number for all axes; HunyuanVL's XD-RoPE; MiniCPM-V's
            canvas; the same for all tokens of an image; or its place, where the model takes the end
            of the prompt besides, because a token behind it sees a window of those behind it.
        axis: which axis of the positions has the numbers that make one.
        deepstack: images also add embeddings to the hidden states of some layers, in the form that
            the type of this name has.
        marks_places: the language model takes a mask of images' tokens.
        tokens: what mlx-vlm's code takes in place of an image's embeddings: a token for each; one
            token, which makes the prompt longer; or any number of tokens that does.
        mark: that token, if it is not the config's ``image_token_index``.
        lead: embeddings in front of the image's that mlx-vlm's code adds to its tokens.
        closes: mlx-vlm's code counts images by two tokens at their ends.
        derived: the parameter that says where an image's tokens are; or one record of an image's
            arrays and the place of its first token.
        together: tokens that see each other, also those behind them: those of an image; also the
            special ones in front of it; all of a prompt.
        has_plane: an image's tokens also have positions in height and width.
        has_table: tokens' embeddings are those of the embedding layer. Others have them from
            ``get_input_embeddings``.
        listed: parameters that are lists of numbers.
    """

    positions: Literal["place", "grid", "equal", "xdrope", "canvas", "block", "prompt"] = "place"
    axis: int = 0
    deepstack: Literal["qwen3_vl", "qwen3_omni_moe", "granite4_vision"] | None = None
    marks_places: bool = False
    tokens: Literal["each", "one", "any"] = "each"
    mark: int | None = None
    lead: int = 0
    closes: bool = False
    derived: Literal["images_seq_mask", "image_bound", "records"] | None = None
    together: Literal["image", "block", "prompt"] | None = None
    has_plane: bool = False
    has_table: bool = False
    listed: frozenset[str] = frozenset()


_PLAIN = Family()
_MROPE = Family("grid")
_MROPE_TABLE = Family("grid", has_table=True)
_DEEPSTACK = Family("grid", deepstack="qwen3_vl")
_ONE = Family(tokens="one")
_ANY = Family(tokens="any")
_SEQ_MASK = Family(derived="images_seq_mask")
_BEHIND_FIRST = Family(lead=1, listed=frozenset({"num_crops", "crop_layouts"}))
_TOGETHER = Family(together="image")

FAMILIES = {
    "aya_vision": _PLAIN,
    "cohere_compass": _DEEPSTACK,
    "deepseek_v41": Family(derived="records"),
    "deepseek_vl_v2": _SEQ_MASK,
    "deepseekocr": _SEQ_MASK,
    "deepseekocr_2": _SEQ_MASK,
    "dots_ocr": _PLAIN,
    "ernie4_5_moe_vl": Family("grid", axis=-1),
    "falcon_ocr": Family("block", together="block", has_plane=True),
    "fastvlm": _ONE,
    "gemma3": _PLAIN,
    "gemma4": _TOGETHER,
    "gemma4_unified": _TOGETHER,
    "glm4v": _MROPE,
    "glm4v_moe": _MROPE,
    "glm5_next": _PLAIN,
    "glm_ocr": _MROPE,
    "got": _PLAIN,
    "granite4_vision": Family(deepstack="granite4_vision"),
    "granite_vision": _ANY,
    "hunyuan_vl": Family("xdrope"),
    "idefics2": _PLAIN,
    "idefics3": _PLAIN,
    "inkling": _PLAIN,
    "internvl": _PLAIN,
    "internvl_chat": _PLAIN,
    "jina_vlm": _PLAIN,
    "kimi_k25": _PLAIN,
    "kimi_k3": _PLAIN,
    "kimi_vl": _PLAIN,
    "lfm2_vl": _PLAIN,
    "llama4": _PLAIN,
    "llava": _PLAIN,
    "llava_bunny": _ONE,
    "llava_next": _ANY,
    "llava_onevision": _PLAIN,
    "llmjpvl": _PLAIN,
    "locateanything": _PLAIN,
    "mage_vl": _PLAIN,
    "mimo_v2": _PLAIN,
    "minimax_m3_vl": _PLAIN,
    "minicpmo": Family("equal", derived="image_bound"),
    "minicpmv4_6": Family("equal", derived="image_bound", has_table=True),
    "minicpmv4_7": Family("canvas", derived="image_bound", has_table=True),
    "mistral3": _PLAIN,
    "molmo": _PLAIN,
    "molmo2": Family(closes=True),
    "moondream2": _BEHIND_FIRST,
    "moondream3": _BEHIND_FIRST,
    "multi_modality": _ONE,
    "muse_glimmer": _PLAIN,
    "nemotron_h_nano_omni": _PLAIN,
    "paddleocr_vl": _MROPE,
    "paligemma": Family(together="prompt"),
    "phi3_v": Family(tokens="any", mark=-1),
    "phi4_siglip": Family(tokens="one", mark=-200),
    "phi4mm": _ONE,
    "pixtral": _PLAIN,
    "plamo2vl": _PLAIN,
    "prism_hadamard_qwen35": _MROPE_TABLE,
    "qwen2_5_vl": _MROPE,
    "qwen2_vl": _MROPE,
    "qwen3_5": _MROPE_TABLE,
    "qwen3_5_moe": _MROPE_TABLE,
    "qwen3_omni_moe": Family("grid", deepstack="qwen3_omni_moe"),
    "qwen3_vl": _DEEPSTACK,
    "qwen3_vl_moe": _DEEPSTACK,
    "qwen4_exp": _MROPE_TABLE,
    "smolvlm": _PLAIN,
    "step3p7": _PLAIN,
    "unlimited_ocr": Family("prompt", derived="images_seq_mask"),
    "youtu_vl": _PLAIN,
    "zaya1_vl": Family(marks_places=True),
}


# The engine computes these, but no worker makes their prompts: mlx-vlm has no processor of theirs,
# or runs code that it downloads.
UNPREPARED = frozenset({"llmjpvl", "moondream2", "youtu_vl"})
# Other names that configs have for types.
ALIASES = {
    "GOT": "got",
    "bunny-llama": "llava_bunny",
    "cohere2_vision": "aya_vision",
    "granite-vision": "granite_vision",
    "inkling_mm_model": "inkling",
    "jvlm": "jina_vlm",
    "lfm2-vl": "lfm2_vl",
    "llava-qwen2": "llava_bunny",
    "llava_qwen2": "fastvlm",
    "nemotron_h_omni": "nemotron_h_nano_omni",
    "nemotronh_nano_omni_reasoning_v3": "nemotron_h_nano_omni",
    "phi4-siglip": "phi4_siglip",
    "unlimited-ocr": "unlimited_ocr",
}
# All models of these types see, and the configs of most have no "vision_config".
ALWAYS_SEE = frozenset(
    {
        "falcon_ocr",
        "fastvlm",
        "got",
        "llava_bunny",
        "molmo",
        "molmo2",
        "moondream3",
        "phi3_v",
        "phi4_siglip",
        "phi4mm",
    }
)


def vision_type(config: Mapping[str, Any]) -> str | None:
    """The type of a vision model, by its config.json; None for all others.

    It is the name of a module of ``mlx_vlm.models``, which may not be installed.
    """
    named = config.get("model_type")
    model_type = ALIASES.get(str(named), str(named))
    if model_type not in FAMILIES or model_type in UNPREPARED:
        return None
    parts = (config, config.get("thinker_config") or {})  # Qwen3-Omni's
    if model_type not in ALWAYS_SEE and not any("vision_config" in part for part in parts):
        return None
    # A model with a file of its own code is mlx-lm's.
    return None if "model_file" in config else model_type


def is_installed() -> bool:
    """Whether the extra "vision" is installed."""
    return find_spec("mlx_vlm") is not None


def family_of(model_type: str) -> Family:
    """How models of this type are called; KeyError if their images are not supported."""
    return FAMILIES[model_type]
