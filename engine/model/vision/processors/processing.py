"""How the processors of the supported types are called."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from chairlift.engine.model.vision.processors import templates
from chairlift.engine.model.vision.processors.overviews import add_overviews


@dataclass(frozen=True, slots=True)
class Processing:
    """How the processor of a type is called, and what it returns.

    Attributes:
        mark: what stands for an image in a text before the processor has run; None: the processor's
            ``image_token``. In it, "{}" is the image's number, from 1 on. Empty: the processor
            places an image itself.
        pattern: a regular expression of all that the processor takes for an image; None: the mark.
        written: what a message that is a text has in an image's place, where that is more than the
            mark, as mlx-vlm's ``prompt_utils`` has it.
        template: the chat template of models that have none, with the result of mlx-vlm's; see
            ``template_of``.
        most: images in a prompt; None: any number. mlx-vlm's code confuses more, or fails.
        tiled: images in a prompt of which the processor makes tiles as its "candidate_resolutions"
            say. With more, each has the first of these resolutions.
        prepared: mlx-vlm's ``prepare_inputs`` calls the processor, because it needs that.
        settings: further arguments. Without ``add_special_tokens`` the processor has no such
            parameter.
        pil: the model of transformers whose processor of images mlx-vlm takes in the form that
            needs torchvision, though another has the same results from Pillow.
        pixels: the part for pixels is mlx-vlm's ``ImageProcessor``, as in its ``load``, because the
            processor has none, or one that reads no settings.
        completes: adds to mlx-vlm's processor what it leaves out.
        token: the token of which an image has one or more, or its id; None: it is in the config, or
            the default of mlx-vlm's; -1: images' tokens have negative ids.
        begins: the processor begins each prompt with a BOS of its own.
        arrays: what it returns that makes an image's embeddings; None: all but what is the text's.
        lists: those arrays that are lists of arrays.
        numbering: those arrays that number the tokens of the prompt.
        padded: an array with an entry for each image, on its second axis, for which mlx-vlm's code
            needs as many entries as there are tiles.
    """

    mark: str | None = None
    pattern: str | None = None
    written: str | None = None
    template: str = templates.PLAIN
    most: int | None = None
    tiled: int | None = None
    prepared: bool = False
    settings: Mapping[str, Any] = field(default_factory=lambda: {"add_special_tokens": False})
    pil: str | None = None
    pixels: bool = False
    completes: Callable[[Any], None] | None = None
    token: str | int | None = None
    begins: bool = False
    arrays: frozenset[str] | None = None
    lists: frozenset[str] = frozenset()
    numbering: frozenset[str] = frozenset()
    padded: str | None = None


_INTERNVL_MARKS = "<IMG_CONTEXT>|<image>"
_INTERNVL = {"add_special_tokens": False, "truncation": False}
_CROPS = frozenset({"pixel_values", "images_spatial_crop"})
_SIZES = frozenset({"pixel_values", "tgt_sizes"})
_GRID = frozenset({"pixel_values", "image_grid_thw"})
_PATCHES = frozenset({"pixel_values", "pixel_attention_mask", "spatial_shapes"})
_PIXELS = frozenset({"pixel_values"})
_NUMBERED = r"<\|image_\d+\|>"
_DEEPSEEK_OCR = Processing(
    written="<image>\n",
    most=1,
    # Otherwise mlx-vlm's code drops the last token, which is a space of its own template.
    settings={"inference_mode": False},
    token="<image>",
    begins=True,
    arrays=_CROPS,
    lists=_PIXELS,
    template=templates.CONTENTS,
)
_LLAVA_NEXT = Processing(settings={}, most=1, prepared=True)
# One token stands for an image; the number of its embeddings is the model's.
_LLAVA_QWEN = Processing(mark="<image>", written="<image>\n", settings={}, most=1, prepared=True)
_MINICPMV = Processing(
    mark="<image>./</image>",
    pattern=r"<image>\./</image>|<image>|<\|image_pad\|>",
    token="<|image_pad|>",
    arrays=_SIZES,
    lists=_PIXELS,
)
_PROCESSING = {
    "deepseek_v41": Processing(
        mark="<\uff5cdeepseek_image\uff5c>",
        settings={},
        prepared=True,
        template=templates.DEEPSEEK_V41,
    ),
    "deepseek_vl_v2": Processing(
        written="<image>\n",
        tiled=2,
        settings={},
        token="<image>",
        begins=True,
        arrays=_CROPS,
        padded="images_spatial_crop",
        template=templates.DEEPSEEK,
    ),
    "deepseekocr": _DEEPSEEK_OCR,
    "deepseekocr_2": _DEEPSEEK_OCR,
    "ernie4_5_moe_vl": Processing(
        mark="<|IMAGE_START|><|image@placeholder|><|IMAGE_END|>",
        settings={},
        pixels=True,
        token="<|IMAGE_PLACEHOLDER|>",
        arrays=_GRID,
    ),
    # The processor writes the whole prompt itself, from a kind of text, like "table", and images.
    "falcon_ocr": Processing(
        mark="",
        settings={},
        most=1,
        arrays=frozenset({"pixel_values", "image_grid_hw"}),
        prepared=True,
        template=templates.LAST,
    ),
    "fastvlm": _LLAVA_QWEN,
    "gemma3": Processing(mark="<start_of_image>"),
    "got": Processing(mark="", pattern="<image>", settings={}, most=1, prepared=True),
    "granite4_vision": Processing(settings={}, most=1),
    "granite_vision": _LLAVA_NEXT,
    "hunyuan_vl": Processing(settings={}, most=1, arrays=_GRID, prepared=True, pixels=True),
    "inkling": Processing(settings={}),
    "internvl": Processing("<IMG_CONTEXT>", _INTERNVL_MARKS, settings=_INTERNVL),
    "internvl_chat": Processing("<image>", _INTERNVL_MARKS, settings=_INTERNVL),
    "jina_vlm": Processing(
        settings={},
        most=1,
        token="<im_patch>",
        numbering=frozenset({"image_input_idx"}),
        prepared=True,
        pixels=True,
    ),
    "kimi_k25": Processing(settings={}),
    "kimi_k3": Processing(
        "<|kimi_image_placeholder|>", r"<\|kimi_image_placeholder\|>|<\|media_pad\|>"
    ),
    "kimi_vl": Processing(
        settings={}, token="<|media_pad|>", arrays=frozenset({"pixel_values", "image_grid_hws"})
    ),
    "llama4": Processing(completes=add_overviews),
    "llava": Processing(settings={}),
    "llava_bunny": replace(_LLAVA_QWEN, pixels=True),
    "llava_next": _LLAVA_NEXT,
    "llava_onevision": Processing(settings={}),
    "locateanything": Processing(
        "<image-{}>", settings={}, pattern=r"<image-\d+>", token="<IMG_CONTEXT>"
    ),
    "minicpmo": Processing(mark="<image>", token="<unk>", arrays=_SIZES, lists=_PIXELS),
    "minicpmv4_6": replace(_MINICPMV, written="(<image>./</image>)\n"),
    "minicpmv4_7": _MINICPMV,
    "molmo": Processing(
        mark="",
        most=1,
        settings={},
        token="<im_patch>",
        arrays=frozenset({"pixel_values", "image_masks", "image_input_idx"}),
        numbering=frozenset({"image_input_idx"}),
    ),
    "molmo2": Processing(
        mark="<|image|>",
        token="<im_patch>",
        arrays=frozenset({"pixel_values", "image_token_pooling", "image_grids", "image_num_crops"}),
    ),
    "moondream3": Processing(
        mark="",
        most=1,
        settings={},
        token=0,
        arrays=frozenset({"pixel_values", "num_crops", "crop_layouts"}),
    ),
    "multi_modality": replace(_LLAVA_QWEN, written=None, pixels=True),
    "paddleocr_vl": Processing(settings={}, most=1),
    "paligemma": Processing(most=1),
    # mlx-vlm's code drops the first token behind an image. Of a line break's, that is an empty one.
    "phi3_v": Processing(
        mark="<|image_{}|>",
        pattern=_NUMBERED,
        written="<|image_{}|>\n",
        settings={},
        token=-1,
        arrays=frozenset({"pixel_values", "image_sizes"}),
    ),
    "phi4_siglip": Processing(
        mark="<image>",
        written="<image>\n",
        settings={},
        token=-1,
        arrays=_PATCHES,
        pil="siglip2",
    ),
    "phi4mm": Processing(
        mark="<|image_{}|>",
        pattern=rf"{_NUMBERED}|<image>",
        settings={},
        token=-1,
        arrays=_PATCHES,
    ),
    "plamo2vl": Processing(
        mark="", settings={}, token="<plamo:image>", prepared=True, template=templates.LINES
    ),
    "step3p7": Processing(most=1),
    "unlimited_ocr": replace(_DEEPSEEK_OCR, most=None, written="<image>"),
}


def processing_of(model_type: str) -> Processing:
    """How the processor of models of this type is called."""
    return _PROCESSING.get(model_type) or Processing()


def template_of(model_type: str) -> str:
    """The chat template of those models of this type that have none."""
    return templates.resolved(processing_of(model_type).template)
