"""Files of images: those that are served, and those that are refused."""

from __future__ import annotations

import io
import random
import struct
import zlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from support.vision.vision_dir import picture

from chairlift.engine.errors import RequestError
from chairlift.engine.model.vision.decoding import FORMATS, LOW_DETAIL, MAX_PIXELS, decode


@pytest.mark.parametrize("kind", FORMATS)
def test_each_format_is_decoded(kind: str) -> None:
    data = picture(1, 50, 30, kind)
    for media_type in (FORMATS[kind], None):
        image = decode(data, media_type, "auto", "image 1")
        assert image.size == (50, 30)
        assert image.mode == "RGB"


def test_a_lossless_picture_keeps_its_pixels() -> None:
    pixels = np.asarray(decode(picture(1), "image/png", "auto", "image 1"))
    assert (pixels == np.random.default_rng(1).integers(0, 256, (24, 40, 3))).all()


def test_a_photograph_is_turned_upright() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # turned by 90 degrees
    assert decode(picture(1, 50, 30, "JPEG", exif=exif), None, "auto", "").size == (30, 50)


def test_of_an_animation_the_first_frame_is_taken() -> None:
    frames = [Image.new("RGB", (8, 8), color) for color in ("red", "blue")]
    file = io.BytesIO()
    frames[0].save(file, "GIF", save_all=True, append_images=frames[1:])
    image = decode(file.getvalue(), "image/gif", "auto", "")
    assert image.getpixel((0, 0)) == (255, 0, 0)


def test_low_detail_scales_down() -> None:
    large = picture(1, 2000, 1000, "JPEG")
    assert decode(large, None, "low", "").size == (LOW_DETAIL, LOW_DETAIL // 2)
    assert decode(large, None, "high", "").size == (2000, 1000)
    assert decode(picture(1, 20, 10), None, "low", "").size == (20, 10)


def _png(width: int, height: int, body: bytes) -> bytes:
    """A PNG of one bit for each pixel, with these compressed pixels."""

    def chunk(name: bytes, data: bytes) -> bytes:
        return (
            struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))
        )

    head = struct.pack(">IIBBBBB", width, height, 1, 0, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", body) + chunk(b"IEND", b"")


SVG = b'<svg xmlns="http://www.w3.org/2000/svg" width="1" height="1"/>'
HOSTILE = {
    "empty": (b"", None, "empty"),
    "text": (b"hello", None, "not an image"),
    "svg": (SVG, "image/svg+xml", "not an image"),
    "svg as png": (SVG, "image/png", "not an image"),
    "tiff": (picture(1, kind="TIFF"), None, "not an image"),
    "bmp": (picture(1, kind="BMP"), "image/bmp", "not an image"),
    "another type": (picture(1, kind="JPEG"), "image/png", "said to be 'image/png'"),
    "type of no image": (picture(1), "text/html", "said to be 'text/html'"),
    "bomb": (_png(30_000, 30_000, zlib.compress(bytes(1 << 20), 9)), None, "pixels"),
    "one too many": (_png(MAX_PIXELS + 1, 1, b""), None, "pixels"),
    "longest": (_png(2**31 - 1, 2**31 - 1, b""), None, "pixels"),
    "no pixels": (_png(0, 5, zlib.compress(b"")), None, "image"),
    "no height": (b"GIF89a" + struct.pack("<HHBBB", 5, 0, 0, 0, 0) + b";", None, "image"),
    "cut short": (picture(1, 200, 200, "JPEG")[:2000], None, "damaged"),
    "cut png": (picture(1, 200, 200)[:-3000], None, "damaged"),
    "cut webp": (picture(1, 200, 200, "WEBP")[:900], None, "image"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_files_are_refused(name: str) -> None:
    data, media_type, reason = HOSTILE[name]
    with pytest.raises(RequestError, match=reason) as error:
        decode(data, media_type, "auto", "image 3")
    assert str(error.value).startswith("image 3: ")
    assert error.value.param == "messages"
    assert len(str(error.value)) < 400


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(
    st.sampled_from(list(FORMATS)),
    st.integers(0, 2**32),
    st.sampled_from(["cut", "flip", "insert", "noise"]),
)
def test_damaged_files_are_images_or_refused(kind: str, seed: int, damage: str) -> None:
    drawn = random.Random(seed)
    data = bytearray(picture(1, 60, 40, kind))
    place = drawn.randrange(len(data))
    if damage == "cut":
        del data[place:]
    elif damage == "flip":
        for _ in range(drawn.randrange(1, 9)):
            data[drawn.randrange(len(data))] ^= 1 << drawn.randrange(8)
    elif damage == "insert":
        data[place:place] = drawn.randbytes(drawn.randrange(1, 40))
    else:
        data[place : place + 40] = drawn.randbytes(40)
    try:
        image = decode(bytes(data), None, "auto", "image 1")
    except RequestError:
        return
    assert image.mode == "RGB"
    assert 0 < image.width * image.height <= MAX_PIXELS
