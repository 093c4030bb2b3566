"""POST /v1/rerank, /v2/rerank and /v1/score, which no model kind of this server can answer.

They exist so that clients of Jina, Cohere and vLLM learn the reason, as at vLLM.
"""

from __future__ import annotations

from typing import NoReturn

from aiohttp import web

from chairlift.api.generate.body import read
from chairlift.api.schemas.field_types import Ignored
from chairlift.api.schemas.request import Request
from chairlift.api.service import SERVICE
from chairlift.engine.errors import RequestError


class RerankRequest(Request):
    """Jina's and Cohere's request."""

    model: str | None = None
    query: Ignored = None
    documents: Ignored = None
    top_n: Ignored = None
    return_documents: Ignored = None
    max_tokens_per_doc: Ignored = None
    max_chunks_per_doc: Ignored = None
    rank_fields: Ignored = None
    truncation: Ignored = None
    truncate_prompt_tokens: Ignored = None
    priority: Ignored = None
    user: Ignored = None


class ScoreRequest(Request):
    """vLLM's request."""

    model: str | None = None
    text_1: Ignored = None
    text_2: Ignored = None
    queries: Ignored = None
    documents: Ignored = None
    items: Ignored = None
    truncate_prompt_tokens: Ignored = None
    priority: Ignored = None
    user: Ignored = None


async def rerank(http: web.Request) -> NoReturn:
    """Refuses to rank documents.

    Raises:
        RequestError: the model cannot.
        NotReady, UnknownModel: as ``Service.model``.
    """
    request = await read(http, RerankRequest)
    _refuse(http, request.model, "Rerank")


async def score(http: web.Request) -> NoReturn:
    """Refuses to score texts. Raises as ``rerank``."""
    request = await read(http, ScoreRequest)
    _refuse(http, request.model, "Score")


def _refuse(http: web.Request, name: str | None, api: str) -> NoReturn:
    model = http.app[SERVICE].model(name)
    raise RequestError(
        f"the model {model.name!r} does not support the {api} API: {model.info.architecture} "
        "generates text and has no scoring head; /v1/embeddings gives vectors to compare",
        "model",
    )
