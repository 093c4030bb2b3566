"""The images of messages, as requests refer to them."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple, cast, get_args

# More images than a conversation has; each takes a processor's time.
MAX_IMAGES = 64
# The schemes of URLs; the server's settings decide which of them are fetched.
SCHEMES = ("data", "http", "https", "file")

Detail = Literal["auto", "low", "high", "original"]


class ImageReference(NamedTuple):
    """An image of a request.

    Attributes:
        url: where it is; a data URL contains it.
        detail: with "low" it is scaled down; the other values mean the same.
    """

    url: str
    detail: Detail = "auto"


class PlacedImage(NamedTuple):
    """An image before the character number ``offset`` of a message's text."""

    offset: int
    image: ImageReference


def image_of(part: dict[str, Any]) -> ImageReference:
    """The image of a content part of type "image_url".

    Raises:
        ValueError: it has no URL of a known scheme, or an unknown detail.
    """
    value = part.get("image_url")
    if isinstance(value, str):
        value = {"url": value}
    url = value.get("url") if isinstance(value, dict) else None
    if not isinstance(value, dict) or not isinstance(url, str):
        raise ValueError('an image_url part must have an object "image_url" with a string "url"')
    return reference_to(url, value.get("detail") or "auto")


def reference_to(url: str, detail: object = "auto") -> ImageReference:
    """A reference to an image.

    Raises:
        ValueError: the URL's scheme, or the detail, is unknown.
    """
    if detail not in get_args(Detail):
        raise ValueError(f"detail must be one of {', '.join(get_args(Detail))}")
    scheme = url[:8].partition(":")[0].lower()
    if scheme not in SCHEMES:
        raise ValueError(f"an image's URL must begin with {', '.join(f'{s}:' for s in SCHEMES)}")
    return ImageReference(url, cast(Detail, detail))


def placed_images(content: object) -> tuple[PlacedImage, ...]:
    """The images of a message's content, which is valid."""
    if not isinstance(content, list):
        return ()
    images: list[PlacedImage] = []
    offset = 0
    for part in content:
        if part["type"] == "image_url":
            images.append(PlacedImage(offset, image_of(part)))
        else:
            offset += len(part[part["type"]])
    return tuple(images)
