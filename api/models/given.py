"""A model that was loaded before the server got it, for tests and for embedding."""

from __future__ import annotations

from dataclasses import dataclass

from chairlift.api.models.served_model import ServedModel
from chairlift.engine.messages import OnProgress


@dataclass(frozen=True, slots=True)
class GivenModel:
    """The ``entry.Loader`` of a model that somebody else has started and will end."""

    model: ServedModel

    async def load(self, on_progress: OnProgress) -> ServedModel:
        """Returns the model."""
        return self.model

    async def unload(self, model: ServedModel) -> None:
        """Does nothing: the model's owner ends its engine."""
