"""The models in Anthropic's form, for its clients' GET /v1/models and /v1/models/{id}."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Literal

from msgspec import Struct

from chairlift.api.schemas.paging import ends_of, page_of, query_schema
from chairlift.api.schemas.replies import ModelCard
from chairlift.engine.errors import RequestError

# Anthropic demands this header, so that all of its clients send it, and no others do.
VERSION_HEADER = "anthropic-version"
_DEFAULT_LIMIT = 20
_MAX_LIMIT = 1000
PAGE_QUERY: Mapping[str, Mapping[str, object]] = {
    "limit": query_schema(_DEFAULT_LIMIT, _MAX_LIMIT)["limit"],
    "after_id": {"type": "string"},
    "before_id": {"type": "string"},
}


class AnthropicModel(Struct):
    """A model. The maximum numbers of tokens are null until it was loaded once."""

    id: str
    display_name: str
    created_at: str
    max_input_tokens: int | None
    max_tokens: int | None
    lifecycle: Literal["active"] = "active"
    type: Literal["model"] = "model"


class AnthropicModelList(Struct):
    data: list[AnthropicModel]
    has_more: bool
    first_id: str | None
    last_id: str | None


def model_of(card: ModelCard) -> AnthropicModel:
    """A model or an adapter in Anthropic's form."""
    created = datetime.fromtimestamp(card.created, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    return AnthropicModel(card.id, card.id, created, card.max_model_len, card.max_model_len)


def models_page(cards: Sequence[ModelCard], query: Mapping[str, str]) -> AnthropicModelList:
    """The page of models that ``limit`` and ``after_id`` or ``before_id`` ask for.

    Raises:
        RequestError: a value is invalid.
    """
    limit = page_of(query, _DEFAULT_LIMIT, _MAX_LIMIT).limit
    ids = [card.id for card in cards]
    if "before_id" in query:
        end = _position(ids, query, "before_id")
        start = max(0, end - limit)
        has_more = start > 0
    else:
        start = _position(ids, query, "after_id") + 1 if "after_id" in query else 0
        end = start + limit
        has_more = end < len(ids)
    models = [model_of(card) for card in cards[start:end]]
    return AnthropicModelList(models, has_more, *ends_of(ids[start:end]))


def _position(ids: Sequence[str], query: Mapping[str, str], name: str) -> int:
    if query[name] not in ids:
        raise RequestError(f"{name}: no model has this id", name)
    return ids.index(query[name])
