"""The request fields for structured output of OpenAI, vLLM, llama.cpp and SGLang."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from itertools import pairwise
from typing import Annotated, Any, Literal, NamedTuple, Self

import msgspec
from pydantic import BeforeValidator, Field, WithJsonSchema, model_validator

from chairlift.api.schemas.decoding import RefusedValue, decoded
from chairlift.api.schemas.fields import checked_size
from chairlift.api.schemas.request import Request
from chairlift.engine.errors import RequestError
from chairlift.engine.grammar.language import MAX_CHARS
from chairlift.engine.grammar.objects import closed
from chairlift.engine.messages import Grammar

MAX_CHOICE_STRINGS = 1000


def _schema(value: object) -> str:
    """The normalized text of a JSON schema, which may be given as an object or as text.

    The order of its fields is kept. A text that is not a JSON object is returned unchanged; the
    grammar library reports the error, except for values that no request may have.
    """
    if isinstance(value, str):
        if len(value) > MAX_CHARS:
            raise ValueError(f"must be at most {MAX_CHARS} characters of JSON")
        try:
            schema = decoded(value)
        except RefusedValue:
            raise
        except ValueError:
            return value
        return msgspec.json.encode(schema).decode() if isinstance(schema, dict) else value
    if not isinstance(value, dict):
        raise ValueError("must be a JSON schema, which is an object")
    return schema_text(value)


def schema_text(value: dict[str, Any]) -> str:
    """The text of a JSON schema; raises ValueError if it is too large or nested too deeply."""
    text = msgspec.json.encode(checked_size(value)).decode()
    if len(text) > MAX_CHARS:
        raise ValueError(f"must be at most {MAX_CHARS} characters of JSON")
    return text


Schema = Annotated[
    str,
    BeforeValidator(_schema),
    WithJsonSchema({"anyOf": [{"type": "object"}, {"type": "string"}]}),
]
Text = Annotated[str, Field(max_length=MAX_CHARS)]
ChoiceStrings = Annotated[list[str], Field(min_length=1, max_length=MAX_CHOICE_STRINGS)]


class NamedSchema(Request):
    """A schema is always enforced. With ``strict``, its objects allow no additional properties."""

    name: Annotated[str, Field(max_length=256)] = ""
    description: str = ""
    text: Annotated[Schema, Field(alias="schema")]
    strict: bool = False


class ResponseFormat(Request):
    """The format of a reply. ``schema`` is llama.cpp's field; OpenAI's is ``json_schema``."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: NamedSchema | None = None
    text: Annotated[Schema | None, Field(alias="schema")] = None

    @model_validator(mode="after")
    def _a_schema_is_given(self) -> Self:
        if self.json_schema is not None and self.type != "json_schema":
            raise ValueError('json_schema goes with the type "json_schema"')
        if self.type == "json_schema" and self.schema_text is None:
            raise ValueError('the type "json_schema" needs json_schema')
        if self.text is not None and self.type == "text":
            raise ValueError('schema does not go with the type "text"')
        if self.text not in (None, self.schema_text):
            raise ValueError("json_schema and schema hold two different schemas")
        return self

    @property
    def schema_text(self) -> str | None:
        """The JSON schema of the reply, or None."""
        return self.text if self.json_schema is None else self.json_schema.text

    @property
    def grammar_requests(self) -> Iterator[GrammarRequest]:
        """The grammar that this field requests, if any."""
        if self.schema_text is not None:
            yield GrammarRequest("response_format", Grammar("json_schema", self.schema_text))
        elif self.type == "json_object":
            yield GrammarRequest("response_format", Grammar("json_object"))


class StructuredOutputs(Request):
    """vLLM's field for structured output, which must have exactly one grammar.

    ``disable_additional_properties`` is like ``strict`` of ``json_schema``.
    """

    json_text: Annotated[Schema | None, Field(alias="json")] = None
    regex: Text | None = None
    choice: ChoiceStrings | None = None
    grammar: Text | None = None
    json_object: bool = False
    disable_additional_properties: bool = False

    @model_validator(mode="after")
    def _exactly_one(self) -> Self:
        if len(list(self.grammar_requests)) != 1:
            raise ValueError("exactly one of json, regex, choice, grammar, json_object")
        return self

    @property
    def grammar_requests(self) -> Iterator[GrammarRequest]:
        """The grammars that this field requests; exactly one if it is valid."""
        prefix = "structured_outputs."
        yield from _each("json_schema", prefix, json=self.json_text)
        yield from _each("regex", prefix, regex=self.regex)
        yield from _each("choice", prefix, choice=self.choice)
        yield from _each("lark", prefix, grammar=self.grammar)
        if self.json_object:
            yield GrammarRequest(f"{prefix}json_object", Grammar("json_object"))


class GrammarRequest(NamedTuple):
    """A requested grammar and the request field it comes from. Kind "lark" may hold GBNF."""

    param: str
    grammar: Grammar


class Structured(Request):
    """The fields for structured output in a request.

    ``grammar`` and ``json_schema`` are llama.cpp's, ``regex``, ``ebnf`` and ``json_schema`` are
    SGLang's, and the ``guided_`` fields are vLLM's older ones.
    """

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: Schema | None = None
    guided_regex: Text | None = None
    guided_choice: ChoiceStrings | None = None
    guided_grammar: Text | None = None
    json_schema: Schema | None = None
    regex: Text | None = None
    grammar: Text | None = None
    ebnf: Text | None = None

    @model_validator(mode="after")
    def _at_most_one(self) -> Self:
        for first, second in pairwise(self.grammar_requests):
            if first.grammar != second.grammar:
                raise RequestError(
                    f"{second.param}: {first.param} already requires another format of the reply",
                    second.param,
                )
        return self

    @cached_property
    def grammar_request(self) -> GrammarRequest | None:
        """The grammar that the reply must follow; None means any text."""
        if not self.grammar_requests:
            return None
        param, grammar = self.grammar_requests[0]
        return GrammarRequest(param, _closed(grammar) if self._is_strict else grammar)

    @cached_property
    def grammar_requests(self) -> list[GrammarRequest]:
        """The grammars that all fields request. Validation ensures that they are equal."""
        form, outputs = self.response_format, self.structured_outputs
        return [
            *(() if form is None else form.grammar_requests),
            *(() if outputs is None else outputs.grammar_requests),
            *_each("json_schema", guided_json=self.guided_json, json_schema=self.json_schema),
            *_each("regex", guided_regex=self.guided_regex, regex=self.regex),
            *_each("choice", guided_choice=self.guided_choice),
            *_each(
                "lark", guided_grammar=self.guided_grammar, grammar=self.grammar, ebnf=self.ebnf
            ),
        ]

    @property
    def _is_strict(self) -> bool:
        form, outputs = self.response_format, self.structured_outputs
        named = None if form is None else form.json_schema
        return (named is not None and named.strict) or (
            outputs is not None and outputs.disable_additional_properties
        )


def _each(
    kind: Literal["json_schema", "regex", "choice", "lark"],
    prefix: str = "",
    **fields: str | list[str] | None,
) -> Iterator[GrammarRequest]:
    """The grammar of each field that is given."""
    for name, value in fields.items():
        if value is not None:
            text = value if isinstance(value, str) else msgspec.json.encode(value).decode()
            yield GrammarRequest(prefix + name, Grammar(kind, text))


def _closed(grammar: Grammar) -> Grammar:
    """The grammar of a schema that is changed to allow no additional properties."""
    try:
        schema = closed(checked_size(msgspec.json.decode(grammar.text, type=dict[str, Any])))
    except (msgspec.MsgspecError, RecursionError, ValueError):
        return grammar  # not a readable schema; ``check`` reports it
    return Grammar(grammar.kind, msgspec.json.encode(schema).decode())
