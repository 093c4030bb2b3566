"""Images in data URLs and files: only from where the settings allow it."""

from __future__ import annotations

import base64
import os
import random
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chairlift.api.schemas.images import ImageReference
from chairlift.api.text.images import files, loading
from chairlift.api.text.images.data_urls import data_url
from chairlift.api.text.images.loading import ImageLoader
from chairlift.engine.errors import RequestError

PNG = b"\x89PNG not really"


@given(st.binary(max_size=200), st.sampled_from(["image/png", ""]), st.booleans())
def test_data_urls_are_decoded(data: bytes, media_type: str, broken_lines: bool) -> None:
    text = base64.b64encode(data).decode()
    if broken_lines:
        text = "\n".join(text[i : i + 20] for i in range(0, len(text), 20))
    assert data_url(f"data:{media_type};base64,{text}") == (data, media_type or None)


@given(st.text(max_size=60))
def test_any_data_url_is_decoded_or_refused(text: str) -> None:
    for url in (f"data:{text}", f"data:image/png;base64,{text}"):
        with suppress(ValueError):
            assert isinstance(data_url(url).data, bytes)


async def test_images_that_are_too_large_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "MAX_TOTAL_BYTES", 100)
    url = f"data:;base64,{base64.b64encode(bytes(30)).decode()}"
    assert len(await ImageLoader().load([ImageReference(url)] * 3)) == 3
    with pytest.raises(RequestError, match="more than 100 bytes"):
        await ImageLoader().load([ImageReference(url)] * 4)


async def test_errors_name_the_image() -> None:
    urls = ["data:;base64,AAAA"] * 5 + ["data:;base64,A"]
    with pytest.raises(RequestError, match=r"^image 6: "):
        await ImageLoader().load([ImageReference(url) for url in urls])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    inside = tmp_path / "in side"
    inside.mkdir()
    (inside / "a b.png").write_bytes(PNG)
    (tmp_path / "secret").write_bytes(b"secret")
    (inside / "link").symlink_to(tmp_path / "secret")
    (inside / "good link").symlink_to(inside / "a b.png")
    os.mkfifo(inside / "pipe")
    return inside


async def test_files_below_the_folder(folder: Path) -> None:
    loader = ImageLoader(folder=folder)
    for name in ("a%20b.png", "good%20link", "./x/../a%20b.png"):
        if "x" in name:
            (folder / "x").mkdir(exist_ok=True)
        reference = ImageReference(f"{folder.as_uri()}/{name}")
        assert (await loader.load([reference]))[0] == (PNG, None, "auto")


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        *((name, "not below") for name in ("../secret", "link", "none", "%2e%2e/secret", "a\0")),
        *((name, "no file") for name in ("pipe", "")),
    ],
)
async def test_other_files(folder: Path, name: str, reason: str) -> None:
    reference = ImageReference(f"{folder.as_uri()}/{name}")
    with pytest.raises(RequestError, match=f"{reason}|must be"):
        await ImageLoader(folder=folder).load([reference])


@pytest.mark.parametrize(
    "url", ["file:a.png", "file://host/etc/passwd", "file:///etc/passwd", "file:///dev/zero"]
)
async def test_files_elsewhere(folder: Path, url: str) -> None:
    with pytest.raises(RequestError, match=r"not below|must be"):
        await ImageLoader(folder=folder).load([ImageReference(url)])
    with pytest.raises(RequestError, match="no images from files"):
        await ImageLoader().load([ImageReference(url)])


async def test_a_file_larger_than_allowed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "MAX_BYTES", 4)
    with pytest.raises(RequestError, match="at most 4 bytes"):
        await ImageLoader(folder=folder).load([ImageReference(f"{folder.as_uri()}/a%20b.png")])


def test_any_path_is_below_the_folder_or_refused(folder: Path) -> None:
    drawn = random.Random(1)
    pieces = ["..", ".", "a b.png", "link", "%2e%2e", "/", "//", "\\", "~", "%00", "secret", "x"]
    for _ in range(500):
        path = "/".join(drawn.choices(pieces, k=drawn.randrange(1, 7)))
        try:
            data = files.read_file(f"{folder.as_uri()}/{path}", folder)
        except ValueError:
            continue
        assert data == PNG
