"""Files that decoders are attacked or confused with: each is shown as meant, or refused."""

from __future__ import annotations

import functools
import io
import random
import struct
import zlib
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageOps
from support.vision.vision_dir import picture

from chairlift.api.observe.access import reason_of
from chairlift.engine.errors import RequestError
from chairlift.engine.model.vision.decoding import FORMATS, decode

WHITE = (255, 255, 255)
PNG = b"\x89PNG\r\n\x1a\n"
# Formats of Pillow that this server does not take. Some run programs (EPS) or read other files.
OTHER = (
    *("AVIF", "BMP", "DDS", "EPS", "ICNS", "ICO", "JPEG2000", "PCX", "PDF", "PPM"),
    *("QOI", "SGI", "SPIDER", "TGA", "TIFF", "XBM"),
)
MODES = {"SPIDER": "F", "XBM": "1"}
HEADERS = {
    "PSD": b"8BPS\0\1" + bytes(6) + struct.pack(">HIIHH", 3, 10, 10, 8, 3) + bytes(100),
    "FLI": bytes(4) + b"\x11\xaf" + bytes(200),
    "SVG": b'<?xml version="1.0"?><!DOCTYPE svg><svg xmlns="http://www.w3.org/2000/svg"/>',
    "PostScript": b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n",
    "HEIC": b"\0\0\0\x18ftypheic" + bytes(100),
}


def shown(data: bytes, detail: str = "auto") -> Image.Image:
    return decode(data, None, detail, "image 1")


def saved(image: Image.Image, kind: str = "PNG", **settings: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **settings)
    return file.getvalue()


def refuses(data: bytes, reason: str, media_type: str | None = None) -> None:
    with pytest.raises(RequestError, match=reason):
        decode(data, media_type, "auto", "image 1")


# Other formats


def other(kind: str) -> bytes:
    if kind in HEADERS:
        return HEADERS[kind]
    return saved(Image.new("RGB", (32, 32)).convert(MODES.get(kind, "RGB")), kind)


@pytest.mark.parametrize("kind", [*OTHER, *HEADERS])
def test_other_formats_are_refused_whatever_they_say_they_are(kind: str) -> None:
    data = other(kind)
    for media_type in (*FORMATS.values(), None):
        refuses(data, "not an image", media_type)
    for begin in (PNG, b"\xff\xd8\xff\xe0", b"GIF89a", b"RIFF\0\0\0\0WEBP"):
        refuses(begin + data, "image", None)


# Many frames, and frames larger than the picture


@pytest.mark.parametrize("kind", ["GIF", "WEBP", "PNG"])
def test_of_many_frames_one_is_decoded(kind: str) -> None:
    frames = [Image.new("RGB", (8, 8), (n % 256, 9 * (n % 2), 0)) for n in range(300)]
    data = saved(frames[7], kind, save_all=True, append_images=frames, lossless=True)
    assert shown(data).getcolors() == [(64, (7, 9, 0))]


def _gif(screen: tuple[int, int], frame: tuple[int, int, int, int]) -> bytes:
    head = b"GIF89a" + struct.pack("<HHBBB", *screen, 0x80, 0, 0) + bytes(6)
    return head + b"," + struct.pack("<HHHHB", *frame, 0) + b"\x02\x02\x4c\x01\x00;"


def _webp(width: int, height: int, frames: int = 1) -> bytes:
    """An animation with a large canvas; all of its frames are one pixel."""

    def chunk(name: bytes, data: bytes) -> bytes:
        return name + struct.pack("<I", len(data)) + data + bytes(len(data) % 2)

    def size(number: int) -> bytes:
        return struct.pack("<I", number)[:3]

    pixel = saved(Image.new("RGB", (1, 1)), "WEBP", lossless=True)[12:]
    head = bytes([2, 0, 0, 0]) + size(width - 1) + size(height - 1)
    body = b"WEBP" + chunk(b"VP8X", head) + chunk(b"ANIM", bytes(6))
    body += chunk(b"ANMF", bytes(12) + size(10) + b"\0" + pixel) * frames
    return b"RIFF" + struct.pack("<I", len(body)) + body


@pytest.mark.parametrize(
    "data",
    [
        _gif((65_535, 65_535), (0, 0, 1, 1)),
        _gif((1, 1), (0, 0, 65_535, 65_535)),
        _gif((1, 1), (0, 0, 8_000, 8_000)),
        _gif((4, 4), (65_000, 65_000, 400, 400)),
        _webp(9_000, 9_000),
        _webp(16_384, 16_384),
        _webp(1 << 24, 200),
    ],
)
def test_a_few_bytes_that_say_they_are_large_are_refused(data: bytes) -> None:
    assert len(data) < 200
    refuses(data, "pixels")


def test_a_canvas_of_many_frames_of_a_pixel() -> None:
    assert shown(_webp(32, 32, 5000)).size == (32, 32)


def test_memory_that_runs_out_is_the_workers_to_report(monkeypatch: pytest.MonkeyPatch) -> None:
    """It knows how much a job may have; an image is not damaged because others are large."""

    def convert(image: Image.Image, mode: str) -> Image.Image:
        raise MemoryError

    monkeypatch.setattr(Image.Image, "convert", convert)
    with pytest.raises(MemoryError):
        shown(picture(1))


# Data beside the pixels


def _chunk(name: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))


def _png(*beside: bytes) -> bytes:
    head = _chunk(b"IHDR", struct.pack(">IIBBBBB", 4, 4, 8, 2, 0, 0, 0))
    rows = zlib.compress((b"\0" + bytes([10, 20, 30]) * 4) * 4)
    return b"".join((PNG, head, *beside, _chunk(b"IDAT", rows), _chunk(b"IEND", b"")))


# Collecting the tests, which each process does, does not compress it.
@functools.cache
def _bomb() -> bytes:
    return zlib.compress(bytes(64 << 20), 9)


@pytest.mark.parametrize(
    ("name", "begin"),
    [(b"zTXt", b"k\0\0"), (b"iTXt", b"k\0\1\0\0\0"), (b"iCCP", b"k\0\0")],
    ids=str,
)
def test_texts_that_grow_when_they_are_read_are_refused(name: bytes, begin: bytes) -> None:
    refuses(_png(_chunk(name, begin + _bomb())), "too large|Too much memory")


def test_many_texts_that_grow_together_are_refused() -> None:
    chunk = _chunk(b"zTXt", b"k\0\0" + zlib.compress(bytes(1 << 20), 9))
    refuses(_png(chunk * 80), "too large|Too much memory")


@pytest.mark.parametrize(
    "chunk",
    [
        _chunk(b"tEXt", b"k\0" + bytes(4 << 20)),
        _chunk(b"tEXt", b"k\0text") * 5000,
        _chunk(b"iCCP", b"k\0\0" + zlib.compress(b"no profile")),
        _chunk(b"eXIf", b"MM\0\x2a\xff\xff\xff\xff"),
        _chunk(b"gAMA", bytes(4)),
        _chunk(b"prIv", bytes(100)),
    ],
)
def test_other_data_changes_nothing(chunk: bytes) -> None:
    assert shown(_png(chunk)).getcolors() == [(16, (10, 20, 30))]


def test_a_file_behind_the_picture_is_not_read() -> None:
    for kind in FORMATS:
        whole = shown(picture(1, kind=kind))
        assert shown(picture(1, kind=kind) + other("EPS")).tobytes() == whole.tobytes()


# Photographs


def test_photographs_that_other_pictures_follow() -> None:
    """As phones make them, with a depth map or a brighter version; Pillow calls them MPO."""
    first, second = (Image.open(io.BytesIO(picture(seed))) for seed in (1, 2))
    data = saved(first, "MPO", save_all=True, append_images=[second])
    image = decode(data, "image/jpeg", "auto", "image 1")
    assert image.tobytes() == shown(saved(first, "JPEG")).tobytes()
    assert decode(data, None, "low", "image 1").size == first.size


@pytest.mark.parametrize("kind", ["JPEG", "WEBP", "PNG"])
@pytest.mark.parametrize("orientation", range(10))
def test_every_orientation(kind: str, orientation: int) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    data = picture(1, 32, 16, kind, exif=exif)
    expected = ImageOps.exif_transpose(Image.open(io.BytesIO(data))).convert("RGB")
    assert shown(data).tobytes() == expected.tobytes()


def test_damaged_exif_does_not_spoil_a_photograph() -> None:
    exif = Image.Exif()
    exif[0x0112], exif[0x010F] = 6, "make"
    exif[0x8769] = {0x9000: b"0230", 0xA002: 5}
    whole, rng = exif.tobytes(), random.Random(3)
    plain = picture(1, 16, 8, "JPEG")
    sizes = set()
    for _ in range(1500):
        damaged = bytearray(whole)
        for _ in range(rng.randrange(1, 8)):
            damaged[rng.randrange(6, len(damaged))] = rng.choice((0, 1, 2, 255, rng.randrange(256)))
        if rng.random() < 0.3:
            del damaged[rng.randrange(8, len(damaged)) :]
        segment = b"\xff\xe1" + struct.pack(">H", len(damaged) + 2) + bytes(damaged)
        sizes.add(shown(plain[:2] + segment + plain[2:]).size)
    assert sizes == {(16, 8), (8, 16)}


def test_errors_quote_what_is_the_clients() -> None:
    """So that the log leaves it out, and a terminal shows no control characters."""
    broken = picture(1, kind="WEBP")[:-9]
    for data, media_type in ((picture(1), "image/\x1b[31m\n\u202e"), (broken, None)):
        with pytest.raises(RequestError) as error:
            decode(data, media_type, "auto", "image 1")
        assert str(error.value).isprintable()
        assert "…" in reason_of(error.value)


# Pixels of other kinds


def _transparent() -> dict[str, bytes]:
    palette = Image.new("P", (4, 4), 0)
    palette.putpalette([255, 0, 0, 0, 255, 0])
    clear = Image.new("RGBA", (4, 4), (0, 0, 0, 0))
    return {
        "RGBA": saved(clear),
        "LA": saved(Image.new("LA", (4, 4), (100, 0))),
        "L": saved(Image.new("L", (4, 4), 7), transparency=7),
        "RGB": saved(Image.new("RGB", (4, 4), (1, 2, 3)), transparency=(1, 2, 3)),
        "P": saved(palette, transparency=0),
        "GIF": saved(palette, "GIF", transparency=0),
        "WebP": saved(clear, "WEBP", lossless=True, exact=True),
    }


@pytest.mark.parametrize("name", _transparent())
def test_what_is_transparent_is_white(name: str) -> None:
    assert shown(_transparent()[name]).getcolors() == [(16, WHITE)]


@pytest.mark.parametrize(
    ("bits", "kind", "pixel", "other", "color"),
    [
        (2, 0, b"\xaa", b"\x55", (2,)),
        (4, 0, b"\x55\x55", b"\x33\x33", (5,)),
        (16, 0, struct.pack(">4H", *[1000] * 4), struct.pack(">4H", *[40_000] * 4), (1000,)),
        (16, 2, struct.pack(">3H", 9, 500, 65535) * 4, bytes(24), (9, 500, 65535)),
    ],
)
def test_a_transparent_color_has_the_depth_of_the_file(
    bits: int, kind: int, pixel: bytes, other: bytes, color: tuple[int, ...]
) -> None:
    """Each row has four pixels, of this color or another one."""
    head = _chunk(b"IHDR", struct.pack(">IIBBBBB", 4, 2, bits, kind, 0, 0, 0))
    clear = _chunk(b"tRNS", struct.pack(f">{len(color)}H", *color))
    rows = _chunk(b"IDAT", zlib.compress(b"\0" + pixel + b"\0" + other))
    image = shown(b"".join((PNG, head, clear, rows, _chunk(b"IEND", b""))))
    assert [image.getpixel((0, y)) == WHITE for y in range(2)] == [True, False]


def test_half_transparent_pixels_are_mixed_with_white() -> None:
    data = saved(Image.new("RGBA", (4, 4), (255, 0, 0, 128)))
    for detail in ("auto", "low"):
        assert shown(data, detail).getcolors() == [(16, (255, 127, 127))]


def test_sixteen_bits_become_eight() -> None:
    levels = np.arange(256, dtype=np.uint16)
    grey = Image.fromarray(np.tile(levels * 257, (4, 1)))
    expected = np.repeat(np.tile(levels, (4, 1))[..., None], 3, 2)
    assert (np.asarray(shown(saved(grey))) == expected).all()


@pytest.mark.parametrize(
    ("image", "kind", "color"),
    [
        (Image.new("CMYK", (8, 8), (0, 255, 255, 0)), "JPEG", (255, 0, 0)),
        (Image.new("L", (8, 8), 9), "JPEG", (9, 9, 9)),
        (Image.new("1", (8, 8), 1), "PNG", WHITE),
        (Image.new("L", (8, 8), 9), "WEBP", (9, 9, 9)),
        (Image.new("P", (8, 8), 0), "GIF", (0, 0, 0)),
    ],
)
def test_other_colors_become_rgb(image: Image.Image, kind: str, color: tuple[int, ...]) -> None:
    settings = {"quality": 100, "lossless": True} if kind in ("JPEG", "WEBP") else {}
    assert shown(saved(image, kind, **settings)).getcolors() == [(64, color)]
