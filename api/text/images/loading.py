"""Gets the files of images from where their URLs say."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from chairlift.api.schemas.images import ImageReference
from chairlift.api.text.images.data_urls import data_url
from chairlift.api.text.images.fetching import fetch
from chairlift.api.text.images.files import read_file
from chairlift.engine.errors import RequestError
from chairlift.engine.messages import ImageSource

# Decoding a longer URL on the event loop would delay streams.
INLINE_CHARS = 64 << 10
# Images of one request that are loaded at the same time, and the bytes of all of them.
AT_ONCE = 4
MAX_TOTAL_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class ImageLoader:
    """Loads images.

    Attributes:
        domains: the hosts that images may be fetched from, in lower case.
        folder: the folder that images may be read from; None: from none.
    """

    domains: frozenset[str] = frozenset()
    folder: Path | None = None

    async def load(self, references: Sequence[ImageReference]) -> list[ImageSource]:
        """The files of images, in this order.

        Raises:
            RequestError: an image cannot be loaded, or the server loads none from there.
        """
        images: list[ImageSource] = []
        for start in range(0, len(references), AT_ONCE):
            some = enumerate(references[start : start + AT_ONCE], start + 1)
            loads = [self._load(each, f"image {number}") for number, each in some]
            loaded = await asyncio.gather(*loads, return_exceptions=True)
            for result in loaded:
                if isinstance(result, BaseException):
                    raise result
                images.append(result)
            if sum(len(image.data) for image in images) > MAX_TOTAL_BYTES:
                raise RequestError(
                    f"messages: the images have more than {MAX_TOTAL_BYTES} bytes", "messages"
                )
        return images

    async def _load(self, reference: ImageReference, name: str) -> ImageSource:
        try:
            data, media_type = await self._loaded(reference.url)
        except ValueError as error:
            raise RequestError(f"{name}: {error}", "messages") from error
        return ImageSource(data, media_type, reference.detail)

    async def _loaded(self, url: str) -> tuple[bytes, str | None]:
        match url[:8].partition(":")[0].lower():
            case "data":
                large = len(url) > INLINE_CHARS
                return await asyncio.to_thread(data_url, url) if large else data_url(url)
            case "file":
                if self.folder is None:
                    raise ValueError("the server reads no images from files")
                return await asyncio.to_thread(read_file, url, self.folder), None
        if not self.domains:
            raise ValueError("the server fetches no images: only data URLs are taken")
        return await fetch(url, self.domains)
