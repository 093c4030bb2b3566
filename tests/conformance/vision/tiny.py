"""What a tiny instance of a type is made of."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from conformance.vision.forms import Form


@dataclass(frozen=True, slots=True)
class Tiny:
    """A type's images, and the values of its config that the common tiny ones do not fit.

    In ``config``, a part that is None is left out. ``constants`` replaces, by name, what mlx-vlm's
    code has instead of fields; it is that of another package's if ``code`` names one.
    """

    form: Form
    config: Mapping[str, Any] = field(default_factory=dict)
    constants: Mapping[str, Any] = field(default_factory=dict)
    code: str = ""
