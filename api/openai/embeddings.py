"""POST /v1/embeddings."""

from __future__ import annotations

import base64

import msgspec
from aiohttp import web

from chairlift.api.generate.answer import json_response
from chairlift.api.generate.body import read
from chairlift.api.generate.vectors import Vectors, compute_vectors
from chairlift.api.schemas.replies import Embedding, EmbeddingList, EmbeddingUsage
from chairlift.api.schemas.schemas import EmbeddingRequest


async def embeddings(http: web.Request) -> web.Response:
    """Computes one vector per text."""
    request = await read(http, EmbeddingRequest)
    computed = await compute_vectors(http, request)
    in_base64 = request.encoding_format == "base64"
    texts = _base64(computed) if in_base64 else await computed.as_json()
    data = [Embedding(text, index) for index, text in enumerate(texts)]
    tokens = computed.prompt_tokens
    return json_response(EmbeddingList(data, computed.model.name, EmbeddingUsage(tokens, tokens)))


def _base64(computed: Vectors) -> list[msgspec.Raw]:
    """Each vector as a JSON string of base64."""
    encoded = (base64.b64encode(vector.astype("<f4").tobytes()) for vector in computed.vectors)
    return [msgspec.Raw(b'"%b"' % text) for text in encoded]
