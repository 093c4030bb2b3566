"""Decodes the bytes of an image, within limits. Runs in a worker process."""

from __future__ import annotations

import io
import warnings

import numpy as np
from PIL import ExifTags, Image, ImageFile, UnidentifiedImageError
from PIL.Image import Transpose

from chairlift.engine.errors import RequestError

# By the names that Pillow and media types have for them.
FORMATS = {"PNG": "image/png", "JPEG": "image/jpeg", "WEBP": "image/webp", "GIF": "image/gif"}
# An image of more pixels is refused before it is decoded: RGB takes three bytes for each, and
# processors make float32 of it. A good camera's photographs have about this many.
MAX_PIXELS = 50_000_000
# The longest side of an image with "detail": "low", as OpenAI has it.
LOW_DETAIL = 512
# Pillow's name for a JPEG that other pictures follow, as of many phones.
_SEVERAL_JPEGS = "MPO"
# How many levels of grey a level of a PNG's file becomes, by Pillow's name for the file's pixels.
_GREY_STEPS = {"L;2": 85, "L;4": 17}
# The transposition that turns an image upright, by its orientation in EXIF.
_UPRIGHT = {
    2: Transpose.FLIP_LEFT_RIGHT,
    3: Transpose.ROTATE_180,
    4: Transpose.FLIP_TOP_BOTTOM,
    5: Transpose.TRANSPOSE,
    6: Transpose.ROTATE_270,
    7: Transpose.TRANSVERSE,
    8: Transpose.ROTATE_90,
}


def decode(data: bytes, media_type: str | None, detail: str, name: str) -> Image.Image:
    """An image as RGB, turned upright, on white where it is transparent; the first of several.

    Args:
        data: PNG, JPEG, WebP or GIF.
        media_type: the type that the client says it has; None if it says nothing.
        detail: with "low", it is scaled down to LOW_DETAIL pixels.
        name: what errors call it.

    Raises:
        RequestError: it is none of these formats, not the one that the client says, damaged, cut
            short, empty, or too large.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return _decoded(data, media_type, detail, name)
    except (RequestError, MemoryError):  # a worker says how much memory a job may have
        raise
    except Image.DecompressionBombError as error:
        raise RequestError(f"{name}: more than {MAX_PIXELS} pixels", "messages") from error
    except Exception as error:  # Pillow's decoders raise exceptions of any type
        # Quoted, because it may contain bytes of the file, which the log leaves out.
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise RequestError(f"{name}: the image is damaged: {reason!r}", "messages") from error


def _decoded(data: bytes, media_type: str | None, detail: str, name: str) -> Image.Image:
    if not data:
        raise RequestError(f"{name}: the image is empty", "messages")
    try:
        image = Image.open(io.BytesIO(data), formats=tuple(FORMATS))
    except (UnidentifiedImageError, SyntaxError) as error:
        known = ", ".join(FORMATS.values())
        raise RequestError(f"{name}: not an image of type {known}", "messages") from error
    with image:
        actual = FORMATS["JPEG" if image.format == _SEVERAL_JPEGS else str(image.format)]
        if media_type is not None and _usual(media_type) != actual:
            raise RequestError(
                f"{name}: the image is {actual}, but its type is said to be {media_type[:64]!r}",
                "messages",
            )
        width, height = image.size
        if not 0 < width * height <= MAX_PIXELS:
            raise RequestError(
                f"{name}: {width} x {height} pixels; an image has 1 to {MAX_PIXELS}", "messages"
            )
        if detail == "low":
            image.draft("RGB", (LOW_DETAIL, LOW_DETAIL))
        _scale_transparency(image)
        image.load()
        upright = _rgb(_upright(image))
    if detail == "low":
        upright.thumbnail((LOW_DETAIL, LOW_DETAIL), Image.Resampling.BICUBIC)
    return upright


def _scale_transparency(image: ImageFile.ImageFile) -> None:
    """Gives a PNG's transparent color the depth of its pixels: Pillow has it as in the file."""
    color = image.info.get("transparency")
    if image.format != "PNG" or color is None or not image.tile:
        return
    form = image.tile[0].args
    if form in _GREY_STEPS:
        image.info["transparency"] = color * _GREY_STEPS[form]
    elif form == "RGB;16B":
        image.info["transparency"] = tuple(level >> 8 for level in color)


def _upright(image: Image.Image) -> Image.Image:
    # NOTE: ImageOps.exif_transpose also writes the EXIF anew, which fails where it is damaged.
    try:
        method = _UPRIGHT[image.getexif()[ExifTags.Base.Orientation]]
    except Exception:  # it has none, or is damaged: Pillow raises exceptions of any type
        return image
    return image.transpose(method)


def _rgb(image: Image.Image) -> Image.Image:
    if image.mode.startswith("I"):  # 16 bits of grey, of which Pillow would keep the lower 8
        levels = np.asarray(image)
        is_clear = levels == image.info.get("transparency", -1)
        return Image.fromarray(np.where(is_clear, 255, levels >> 8).astype(np.uint8)).convert("RGB")
    if not image.has_transparency_data:
        return image.convert("RGB")
    shown = image.convert("RGBA")
    white = Image.new("RGB", image.size, "white")
    white.paste(shown, mask=shown)
    return white


def _usual(media_type: str) -> str:
    media_type = media_type.strip().lower()
    return "image/jpeg" if media_type == "image/jpg" else media_type
