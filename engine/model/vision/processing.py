"""How the processors of the supported types are called."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pkgutil import resolve_name
from typing import Any

_MLX_VLM = "mlx_vlm.models."
# As mlx-vlm renders conversations for models without a template. It adds BOS afterwards.
_PLAIN = (
    "{%- if messages | length == 1 and messages[0]['role'] == 'user' -%}"
    "{{ messages[0]['content'] }}"
    "{%- else -%}"
    "{%- for message in messages -%}"
    "{{ message['role'] | capitalize }}:"
    "{% if message['content'] %} {{ message['content'] }}{% endif %}"
    "{% if add_generation_prompt or not loop.last %}{{ '\n' }}{% endif %}"
    "{%- endfor -%}"
    "{% if add_generation_prompt %}Assistant:{% endif %}"
    "{%- endif -%}"
)
_CONTENTS = "{{ bos_token }}{{ messages | map(attribute='content') | join(' ') }}"
_LAST = "{{ messages[-1]['content'] }}"
_LINES = "{{ messages | map(attribute='content') | join('\n') }}"
_DEEPSEEK = (
    "{{ bos_token }}"
    "{%- set names = {'user': '<|User|>:', 'assistant': '<|Assistant|>'} -%}"
    "{%- for message in messages -%}"
    "{{ names.get(message['role'], '') + ' ' + message['content'] + '\n\n' }}"
    "{%- endfor -%}"
    "{% if add_generation_prompt %}<|Assistant|>:{% endif %}"
)


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
        other_mark: what the processor would take for an image, too.
        most: images in a prompt; None: any number. mlx-vlm's code confuses more, or fails.
        tiled: images in a prompt of which the processor makes tiles as its "candidate_resolutions"
            say. With more, each has the first of these resolutions.
        settings: further arguments. Without ``add_special_tokens`` the processor has no such
            parameter.
        token: the token of which an image has one for each of its embeddings, or its id; None: it
            is in the config; -1: images' tokens have negative ids.
        lead: tokens in front of the image that may have the same id.
        begins: the processor begins each prompt with a BOS of its own.
        arrays: what it returns that makes an image's embeddings; None: all but what is the text's.
        lists: those arrays that are lists of arrays.
        numbering: those arrays that number the tokens of the prompt.
        padded: an array with an entry for each image, on its second axis, for which mlx-vlm's code
            needs as many entries as there are tiles.
        counted: the mask with as many ones as an image has embeddings, where the processor puts one
            negative token for an image.
        pil: the model of transformers whose processor of images mlx-vlm takes in the form that
            needs torchvision, though another has the same results from Pillow.
        template: the chat template of models that have none, with the result of mlx-vlm's; or
            mlx-vlm's name of it. See ``template_of``.
        prepared: mlx-vlm's ``prepare_inputs`` calls the processor, because it needs that.
        config_token: the name of the token's id in mlx-vlm's config, where it may be a default.
        records: an image is a record of DeepSeek's.
    """

    mark: str | None = None
    other_mark: str | None = None
    settings: Mapping[str, Any] = field(default_factory=lambda: {"add_special_tokens": False})
    pattern: str | None = None
    written: str | None = None
    most: int | None = None
    tiled: int | None = None
    token: str | int | None = None
    lead: int = 0
    begins: bool = False
    arrays: frozenset[str] | None = None
    lists: frozenset[str] = frozenset()
    numbering: frozenset[str] = frozenset()
    padded: str | None = None
    counted: str | None = None
    pil: str | None = None
    template: str = _PLAIN
    prepared: bool = False
    config_token: str | None = None
    records: bool = False


_INTERNVL = {"add_special_tokens": False, "truncation": False}
_CROPS = frozenset({"pixel_values", "images_spatial_crop"})
_SIZES = frozenset({"pixel_values", "tgt_sizes"})
_GRID = frozenset({"pixel_values", "image_grid_thw"})
_PATCHES = frozenset({"pixel_values", "pixel_attention_mask", "spatial_shapes"})
_PIXELS = frozenset({"pixel_values"})
_NUMBERED = r"<\|image_\d+\|>"
# Otherwise mlx-vlm's code drops the last token, which is a space of its own template.
_WHOLE = {"inference_mode": False}
_DEEPSEEK_OCR = Processing(
    written="<image>\n",
    most=1,
    settings=_WHOLE,
    token="<image>",
    begins=True,
    arrays=_CROPS,
    lists=_PIXELS,
    template=_CONTENTS,
)
_LLAVA_NEXT = Processing(settings={}, most=1, prepared=True)
# One token stands for an image; the number of its embeddings is the model's.
_LLAVA_QWEN = Processing(
    mark="<image>",
    written="<image>\n",
    settings={},
    most=1,
    prepared=True,
    config_token="image_token_index",
)
_PROCESSING = {
    "deepseek_v41": Processing(
        mark="<\uff5cdeepseek_image\uff5c>",
        settings={},
        prepared=True,
        template=f"{_MLX_VLM}deepseek_v41.processing_deepseek_v41.DEFAULT_CHAT_TEMPLATE",
        config_token="image_token_id",
        records=True,
    ),
    "deepseek_vl_v2": Processing(
        written="<image>\n",
        tiled=2,
        settings={},
        token="<image>",
        begins=True,
        arrays=_CROPS,
        padded="images_spatial_crop",
        template=_DEEPSEEK,
    ),
    "deepseekocr": _DEEPSEEK_OCR,
    "deepseekocr_2": _DEEPSEEK_OCR,
    "ernie4_5_moe_vl": Processing(
        mark="<|IMAGE_START|><|image@placeholder|><|IMAGE_END|>",
        settings={},
        token="<|IMAGE_PLACEHOLDER|>",
        arrays=_GRID,
    ),
    # It makes a prompt of its own of a kind of text, like "table", and images.
    "falcon_ocr": Processing(
        mark="",
        settings={},
        most=1,
        arrays=frozenset({"pixel_values", "image_grid_hw"}),
        prepared=True,
        config_token="img_id",
        template=_LAST,
    ),
    "fastvlm": _LLAVA_QWEN,
    "gemma3": Processing(mark="<start_of_image>"),
    "got": Processing(
        mark="",
        other_mark="<image>",
        settings={},
        most=1,
        prepared=True,
        config_token="im_patch_token",
    ),
    "granite_vision": _LLAVA_NEXT,
    "hunyuan_vl": Processing(settings={}, most=1, arrays=_GRID, prepared=True),
    "internvl": Processing("<IMG_CONTEXT>", "<image>", _INTERNVL),
    "internvl_chat": Processing("<image>", "<IMG_CONTEXT>", _INTERNVL),
    "jina_vlm": Processing(
        settings={},
        most=1,
        token="<im_patch>",
        numbering=frozenset({"image_input_idx"}),
        prepared=True,
    ),
    "kimi_vl": Processing(
        settings={}, token="<|media_pad|>", arrays=frozenset({"pixel_values", "image_grid_hws"})
    ),
    "llava": Processing(settings={}),
    "llava_bunny": _LLAVA_QWEN,
    "llava_next": _LLAVA_NEXT,
    "mimo_v2": Processing(config_token="image_token_id"),
    "minicpmo": Processing(mark="<image>", token="<unk>", arrays=_SIZES, lists=_PIXELS),
    "minicpmv4_6": Processing(
        mark="<image>./</image>",
        pattern=r"<image>\./</image>|<image>|<\|image_pad\|>",
        written="(<image>./</image>)\n",
        token="<|image_pad|>",
        arrays=_SIZES,
        lists=_PIXELS,
    ),
    "minicpmv4_7": Processing(
        mark="<image>./</image>",
        pattern=r"<image>\./</image>|<image>|<\|image_pad\|>",
        token="<|image_pad|>",
        arrays=_SIZES,
        lists=_PIXELS,
    ),
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
        lead=1,
        arrays=frozenset({"pixel_values", "num_crops", "crop_layouts"}),
    ),
    "multi_modality": replace(_LLAVA_QWEN, written=None),
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
        counted="pixel_attention_mask",
        pil="siglip2",
    ),
    "phi4mm": Processing(
        mark="<|image_{}|>",
        pattern=rf"{_NUMBERED}|<image>",
        settings={},
        token=-1,
        arrays=_PATCHES,
        counted="pixel_attention_mask",
    ),
    "plamo2vl": Processing(
        mark="", settings={}, token="<plamo:image>", prepared=True, template=_LINES
    ),
    "unlimited_ocr": replace(_DEEPSEEK_OCR, most=None, written="<image>"),
}


def processing_of(model_type: str) -> Processing:
    """How the processor of models of this type is called."""
    return _PROCESSING.get(model_type) or Processing()


def template_of(model_type: str) -> str:
    """The chat template of those models of this type that have none."""
    template = processing_of(model_type).template
    if not template.startswith(_MLX_VLM):
        return template
    found: str = resolve_name(template)
    return found
