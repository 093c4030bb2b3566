"""All packages of mlx-vlm that take images, and why some of them cannot be checked."""

from __future__ import annotations

import pkgutil
from pathlib import Path

from conformance.vision import crops, grids, own_caches, squares

TYPES = {**crops.TYPES, **grids.TYPES, **own_caches.TYPES, **squares.TYPES}

_CHOOSES = "it chooses among given answers"
_EMBEDS = "it makes embeddings, no text"
_SEES = "it finds objects, masks or depths, no text"
_CROSS = "its layers attend across to the image, with caches that no row shares"
NOT_APPLICABLE: dict[str, str] = {
    "clef": _CHOOSES,
    "colidefics3": _EMBEDS,
    "colqwen2_5": _EMBEDS,
    "d1": _CHOOSES,
    "d1_omni": _CHOOSES,
    "diffusion_gemma": "its text is made by diffusion",
    "embedding_gemma2": _EMBEDS,
    "florence2": _CROSS,
    "indic_ocr": "a pipeline of detectors and recognizers without a language model",
    "llama_nemotron_vl_embedding": _EMBEDS,
    "mistral_large3": "mlx-vlm's language model ignores the embeddings of images",
    "mllama": _CROSS,
    "moge3": _SEES,
    "muse_spark": "mlx-vlm cannot run it here: its layers have Metal kernels only",
    "nemotron_parse": _CROSS,
    "pp_doclayout_v3": _SEES,
    "qwen3_vl_embedding": _EMBEDS,
    "qwen_image": "it makes images",
    "rfdetr": _SEES,
    "rt_detr_v2": _SEES,
    "sam3": _SEES,
    "sam3_1": _SEES,
    "sam3d_body": _SEES,
    "sam3d_objects": _SEES,
    "siglip": _EMBEDS,
    "video_depth_anything": _SEES,
}
# Why a type fails that is not even tried.
NOT_TRIED: dict[str, str] = {
    "deepseek_v4": "what a group of tokens becomes depends on the model call that completes it",
    "falcon_perception": "a token brings coordinates besides its id",
    "gemma3n": "mlx-vlm scales the embeddings of generated tokens, but not those of prompts",
    "molmo_point": "a token's logits include those of places in the image",
}


def type_names() -> list[str]:
    """The packages of the installed mlx-vlm with code for images, in order."""
    import mlx_vlm.models

    root = Path(mlx_vlm.models.__path__[0])
    packages = [each.name for each in pkgutil.iter_modules([str(root)]) if each.ispkg]
    return [name for name in sorted(packages) if _takes_images(root / name)]


def _takes_images(package: Path) -> bool:
    if (package / "vision.py").exists():
        return True
    texts = [path.read_text() for path in package.glob("*.py")]
    return any(word in text for text in texts for word in ("VisionConfig", "ImageProcessor"))
