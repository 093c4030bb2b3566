"""Gets the files of images from where their URLs say."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from chairlift.api.schemas.images import ImageReference
from chairlift.api.text.images.data_urls import data_url
from chairlift.engine.errors import RequestError
from chairlift.engine.messages import ImageSource

# Decoding a longer URL on the event loop would delay streams.
INLINE_CHARS = 64 << 10


async def load_images(references: Sequence[ImageReference]) -> list[ImageSource]:
    """The files of images, in this order.

    Raises:
        RequestError: an image cannot be loaded, or the server loads none from there.
    """
    return [
        await _load(reference, f"image {number}") for number, reference in enumerate(references, 1)
    ]


async def _load(reference: ImageReference, name: str) -> ImageSource:
    url, detail = reference
    try:
        if url[:5].lower() != "data:":
            raise ValueError("only data URLs are supported")
        large = len(url) > INLINE_CHARS
        found = await asyncio.to_thread(data_url, url) if large else data_url(url)
    except ValueError as error:
        raise RequestError(f"{name}: {error}", "messages") from error
    return ImageSource(found.data, found.media_type, detail)
