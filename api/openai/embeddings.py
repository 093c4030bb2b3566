"""POST /v1/embeddings."""

from __future__ import annotations

import base64

from aiohttp import web

from chairlift.api.generate.answer import json_response
from chairlift.api.generate.body import read
from chairlift.api.generate.vectors import Vectors, compute_vectors
from chairlift.api.schemas.replies import Embedding, EmbeddingList, EmbeddingUsage
from chairlift.api.schemas.schemas import EmbeddingRequest


async def embeddings(http: web.Request) -> web.Response:
    """Computes one vector per text."""
    request = await read(http, EmbeddingRequest)
    return json_response(_reply(request, await compute_vectors(http, request)))


def _reply(request: EmbeddingRequest, computed: Vectors) -> EmbeddingList:
    in_base64 = request.encoding_format == "base64"
    data = [
        Embedding(
            base64.b64encode(vector.astype("<f4").tobytes()).decode()
            if in_base64
            else vector.tolist(),
            index,
        )
        for index, vector in enumerate(computed.vectors)
    ]
    tokens = computed.prompt_tokens
    return EmbeddingList(data, computed.model.name, EmbeddingUsage(tokens, tokens))
