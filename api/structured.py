"""What a reply has to be: OpenAI's field for it, vLLM's, and vLLM's older ones."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple, Self

import msgspec
from pydantic import BeforeValidator, Field, WithJsonSchema, model_validator

from chairlift.api.fields import bounded
from chairlift.api.request import Request
from chairlift.engine.errors import GrammarError, RequestError, UnsupportedModel
from chairlift.engine.grammar.language import MAX_CHARS
from chairlift.engine.messages import Grammar

if TYPE_CHECKING:  # it imports transformers, which takes a second
    from chairlift.api.vocabulary import Vocabulary

MAX_CHOICES = 1000


def _schema(value: object) -> str:
    """A JSON schema's text, whichever way it comes; the order of its properties is kept."""
    if not isinstance(value, str | dict):
        raise ValueError("must be a JSON schema, which is an object")
    text = value if isinstance(value, str) else msgspec.json.encode(bounded(value)).decode()
    if len(text) > MAX_CHARS:
        raise ValueError(f"must be at most {MAX_CHARS} characters of JSON")
    return text


Schema = Annotated[
    str,
    BeforeValidator(_schema),
    WithJsonSchema({"anyOf": [{"type": "object"}, {"type": "string"}]}),
]
Text = Annotated[str, Field(max_length=MAX_CHARS)]
Choice = Annotated[list[str], Field(min_length=1, max_length=MAX_CHOICES)]


class NamedSchema(Request):
    """``strict`` changes nothing: a reply is always held to all of the schema."""

    name: Annotated[str, Field(max_length=256)] = ""
    description: str = ""
    text: Annotated[Schema, Field(alias="schema")]
    strict: bool = False


class ResponseFormat(Request):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: NamedSchema | None = None

    @model_validator(mode="after")
    def _a_schema_is_given(self) -> Self:
        if (self.json_schema is not None) != (self.type == "json_schema"):
            raise ValueError('json_schema goes with the type "json_schema"')
        return self


class StructuredOutputs(Request):
    """Exactly one of them."""

    json_text: Annotated[Schema | None, Field(alias="json")] = None
    regex: Text | None = None
    choice: Choice | None = None
    grammar: Text | None = None
    json_object: bool = False

    @model_validator(mode="after")
    def _exactly_one(self) -> Self:
        if len(list(self.wanted)) != 1:
            raise ValueError("exactly one of json, regex, choice, grammar, json_object")
        return self

    @property
    def wanted(self) -> list[Wanted]:
        """What it asks for."""
        wanted = _wanted(self.json_text, self.regex, self.choice, self.grammar)
        if self.json_object:
            wanted["json_object"] = Grammar("json_object")
        return [Wanted(f"structured_outputs.{name}", grammar) for name, grammar in wanted.items()]


class Wanted(NamedTuple):
    """What a reply has to be, and the field that says so. Of kind "lark" it may be GBNF as well."""

    param: str
    grammar: Grammar


class Structured(Request):
    """The fields of a request that generates."""

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: Schema | None = None
    guided_regex: Text | None = None
    guided_choice: Choice | None = None
    guided_grammar: Text | None = None

    @model_validator(mode="after")
    def _at_most_one(self) -> Self:
        if len(wanted := self._all_wanted) > 1:
            raise RequestError(
                f"{wanted[1].param}: the reply has to be something already, by {wanted[0].param}",
                wanted[1].param,
            )
        return self

    @property
    def wanted(self) -> Wanted | None:
        """What the reply has to be; None: anything."""
        return next(iter(self._all_wanted), None)

    @property
    def _all_wanted(self) -> list[Wanted]:
        wanted = []
        if (form := self.response_format) is not None:
            if form.json_schema is not None:
                grammar = Grammar("json_schema", form.json_schema.text)
                wanted.append(Wanted("response_format", grammar))
            elif form.type == "json_object":
                wanted.append(Wanted("response_format", Grammar("json_object")))
        if self.structured_outputs is not None:
            wanted += self.structured_outputs.wanted
        guided = _wanted(
            self.guided_json, self.guided_regex, self.guided_choice, self.guided_grammar
        )
        return wanted + [Wanted(f"guided_{name}", grammar) for name, grammar in guided.items()]


def _wanted(
    schema: str | None, regex: str | None, choice: list[str] | None, grammar: str | None
) -> dict[str, Grammar]:
    """What each of the fields asks for that are there, by its name."""
    fields: dict[str, tuple[Any, str | None]] = {
        "json": ("json_schema", schema),
        "regex": ("regex", regex),
        "choice": ("choice", None if choice is None else msgspec.json.encode(choice).decode()),
        "grammar": ("lark", grammar),
    }
    return {name: Grammar(kind, text) for name, (kind, text) in fields.items() if text is not None}


async def grammar_of(request: Structured, vocabulary: Vocabulary) -> Grammar | None:
    """What the replies to a request are held to, if to anything: known to be possible.

    Raises:
        RequestError: it is not valid, or not supported, or takes too much.
        QueueFull: too many others are being found out about.
    """
    if (wanted := request.wanted) is None:
        return None
    param, grammar = wanted
    if grammar.kind == "lark":
        try:
            grammar = Grammar("lark", await vocabulary.grammars.as_lark(grammar.text))
        except GrammarError as error:
            raise RequestError(f"{param}: {error}", param) from error
    await check(Wanted(param, grammar), vocabulary)
    return grammar


async def check(wanted: Wanted, vocabulary: Vocabulary) -> None:
    """Raises what ``grammar_of`` does, if replies cannot be held to what is wanted."""
    try:
        await vocabulary.grammars.check(wanted.grammar)
    except (GrammarError, UnsupportedModel) as error:
        raise RequestError(f"{wanted.param}: {error}", wanted.param) from error
