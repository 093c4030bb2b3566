"""Finds the schemas within a JSON schema, and those that describe the same value together."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any, TypeGuard
from urllib.parse import unquote

# A schema is an object, true or false.
Schema = dict[str, Any] | bool
Object = dict[str, Any]

_ONE = ("additionalProperties", "items")
_LISTED = ("prefixItems", "anyOf", "oneOf", "allOf")
_NAMED = ("properties", "patternProperties", "$defs", "definitions")
# Keywords whose schemas apply to the same value as the schema around them.
APPLYING = frozenset({"allOf", "anyOf", "oneOf", "$ref"})
# Keywords that describe an object's properties.
OF_PROPERTIES = frozenset(
    {"properties", "patternProperties", "additionalProperties", "required"}
    | {"minProperties", "maxProperties"}
)

# Called with a schema's keyword, its JSON pointer and the schema; returns the replacement.
Change = Callable[[str, str, Schema], Schema]


def changed(schema: Object, pointer: str, change: Change) -> Object:
    """A copy in which ``change`` has replaced each schema directly within ``schema``."""
    copy = dict(schema)
    for keyword, value in schema.items():
        path = f"{pointer}/{keyword}"
        if keyword in _NAMED and isinstance(value, dict):
            copy[keyword] = {
                name: change(keyword, f"{path}/{_escaped(name)}", one) if is_schema(one) else one
                for name, one in value.items()
            }
        elif keyword in _LISTED and isinstance(value, list):
            copy[keyword] = [
                change(keyword, f"{path}/{number}", one) if is_schema(one) else one
                for number, one in enumerate(value)
            ]
        elif keyword in _ONE and is_schema(value):
            copy[keyword] = change(keyword, path, value)
    return copy


def combines(schema: Object) -> bool:
    """Whether several schemas here describe one value together: applied ones, or this one too."""
    applying = APPLYING & schema.keys()
    return bool(applying) and (
        len(applying) > 1
        or not OF_PROPERTIES.isdisjoint(schema)
        or ("allOf" in schema and len(_list(schema["allOf"])) > 1)
    )


def combined(schema: Object) -> set[str]:
    """The JSON pointers of all schemas that describe a value together with other schemas."""
    found: set[str] = set()
    # The targets of references that apply to the same value as a schema, by that schema's pointer.
    leading: dict[str, list[str]] = defaultdict(list)

    def walk(one: Schema, pointer: str, owners: tuple[str, ...], together: bool) -> None:
        if isinstance(one, bool):
            return
        if together:
            found.add(pointer)
        owners = (*owners, pointer) if len(owners) < 2 else (owners[0], pointer)
        together = together or combines(one)
        if isinstance(reference := one.get("$ref"), str):
            target = unquote(reference)
            leading[owners[0]].append(target)
            if together:
                found.add(target)

        def visit(keyword: str, path: str, inner: Schema) -> Schema:
            applied = keyword in APPLYING
            walk(inner, path, owners if applied else (), applied and together)
            return inner

        changed(one, pointer, visit)

    walk(schema, "#", (), False)
    waiting = list(found)
    while waiting:
        for target in leading[waiting.pop()]:
            if target not in found:
                found.add(target)
                waiting.append(target)
    return found


def is_schema(value: object) -> bool:
    """Whether a value has the form of a schema."""
    return isinstance(value, dict | bool)


def is_number(value: object) -> TypeGuard[int | float]:
    """Whether a value is a JSON number."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def _list(value: object) -> list[Any]:
    return value if isinstance(value, list) else []


def _escaped(name: str) -> str:
    return name.replace("~", "~0").replace("/", "~1")
