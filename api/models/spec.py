"""How the server is told to serve one model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

from chairlift.api.settings import ServerSettings
from chairlift.engine.config import EngineConfig

Load = Literal["eager", "lazy"]
LOADS: tuple[Load, ...] = get_args(Load)


class ModelsMemory(NamedTuple):
    """The memory of all engines of a server of several models.

    Attributes:
        bytes: how much they may use together; None: a share.
        share: that share of the device's memory, above 0 and at most 1; None: most of what is free.
    """

    bytes: int | None = None
    share: float | None = None


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """One model of a server.

    Attributes:
        config: its engine's settings.
        settings: the server's settings, with this model's own name, template, tags and defaults.
        aliases: further names of it in the API.
        load: "eager": at the start; "lazy": on first use.
        keep_alive: seconds without a request after which it is unloaded; None: it stays.
    """

    config: EngineConfig
    settings: ServerSettings
    aliases: tuple[str, ...] = ()
    load: Load = "eager"
    keep_alive: float | None = None
