"""Applies ``patternProperties`` also to the properties that a JSON schema names."""

from __future__ import annotations

from collections.abc import Callable

from chairlift.engine.grammar.subschemas import Object, Schema, changed


def with_applied_patterns(schema: Object, names_apart: Callable[[Schema], bool]) -> Object:
    """A schema of the same meaning, after ``apart`` for each object in it."""

    def rewritten(keyword: str, pointer: str, one: Schema) -> Schema:
        if isinstance(one, bool):
            return one
        return changed(apart(one, names_apart), pointer, rewritten)

    result = rewritten("", "#", schema)
    assert isinstance(result, dict)
    return result


def apart(schema: Object, names_apart: Callable[[Schema], bool]) -> Object:
    """A schema of the same meaning whose patterns are in ``allOf`` if it also names properties.

    The grammar library applies patterns to a named property only if they are in another schema.

    Args:
        names_apart: whether a pattern with this schema need not be applied to named properties.
    """
    patterns = schema.get("patternProperties")
    if not schema.get("properties") or not patterns or all(map(names_apart, patterns.values())):
        return schema
    return {
        **schema,
        # They stay here for additionalProperties, which does not apply to what they match.
        "patternProperties": dict.fromkeys(patterns, True),
        "allOf": [*schema.get("allOf", ()), {"patternProperties": patterns}],
    }
