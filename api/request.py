"""What any JSON body's pydantic model is made of. null means absent."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel, ConfigDict, model_validator


class Request(BaseModel):
    """Any JSON body. Values are not coerced: "5" is not a number."""

    model_config = ConfigDict(extra="allow", strict=True)

    @model_validator(mode="before")
    @classmethod
    def _null_is_absent(cls, data: Any) -> Any:
        if isinstance(data, dict):
            return {name: value for name, value in data.items() if value is not None}
        return data

    def all_extra(self) -> Iterator[dict[str, Any]]:
        """The fields that this object, and each one in it, do not declare."""
        yield self.model_extra or {}
        for name in type(self).model_fields:
            value = getattr(self, name)
            for inner in value if isinstance(value, list) else (value,):
                if isinstance(inner, Request):
                    yield from inner.all_extra()
