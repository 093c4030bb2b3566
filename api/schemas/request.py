"""The base class of all request models."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, GetCoreSchemaHandler, model_validator
from pydantic_core import CoreSchema

from chairlift.api.schemas.bounds import MAX_PARTS, MAX_VALUES, bounded, values_of
from chairlift.engine.errors import RequestError


class Request(BaseModel):
    """A JSON object of a request.

    A field that is null counts as absent. Values are not coerced: "5" is not a number, but
    5.0 is an integer.
    """

    # Most servers receive requests of one API only; building the others takes a tenth of the start.
    model_config = ConfigDict(extra="allow", strict=True, defer_build=True)

    @classmethod
    def __get_pydantic_core_schema__(
        cls, source: type[BaseModel], handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        schema: CoreSchema = bounded(handler(source))
        return schema

    @model_validator(mode="before")
    @classmethod
    def _null_is_absent(cls, data: Any) -> Any:
        if isinstance(data, dict):
            return {name: value for name, value in data.items() if value is not None}
        return data

    def take_extra(self) -> list[dict[str, Any]]:
        """Removes and returns the undeclared fields.

        The first entry has those of this object; each further one, those of a nested object.

        Raises:
            RequestError: the object contains too many parts or values.
        """
        found = [self.model_extra or {}]
        # Most requests have few of the fields.
        given = self.model_fields_set
        for name in [name for name in type(self).model_fields if name in given]:
            field = getattr(self, name)
            if not isinstance(field, list | dict | Request):
                continue
            parts = _parts(field)
            if len(parts) > MAX_PARTS:
                raise RequestError(
                    f"{name}: at most {MAX_PARTS} parts (messages, content parts, calls) in all",
                    name,
                )
            objects = [value for part in parts for value in part.__dict__.values()]
            objects = [value for value in (*objects, field) if type(value) is dict]
            if sum(map(values_of, objects)) > MAX_VALUES:
                raise RequestError(f"{name}: at most {MAX_VALUES} values in all objects", name)
            found += [part.model_extra or {} for part in parts]
        taken = [dict(found[0]), *(dict(extra) for extra in found[1:] if extra)]
        for extra in found:
            extra.clear()
        return taken


def _parts(value: object) -> list[Request]:
    """The objects in a field's value, including nested ones."""
    found: list[Request] = []
    level = [value]
    while level and len(found) <= MAX_PARTS:
        parts: list[Request] = []
        for one in level:
            if isinstance(one, Request):
                parts.append(one)
            # Skip lists of numbers or texts, which may be long.
            elif isinstance(one, list) and one and not isinstance(one[0], int | float | str):
                parts += [item for item in one if isinstance(item, Request)]
        found += parts
        level = [inner for part in parts for inner in part.__dict__.values()]
    return found
