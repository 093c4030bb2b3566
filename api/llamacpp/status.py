"""Handlers of GET /props and /slots."""

from __future__ import annotations

import msgspec
from aiohttp import web

from chairlift.api.generate.answer import json_response
from chairlift.api.http.version import VERSION
from chairlift.api.llamacpp.replies import LlamaDefaults, LlamaModalities, LlamaProps, LlamaSlot
from chairlift.api.service import SERVICE


async def llama_props(http: web.Request) -> web.Response:
    """Describes the server and its model."""
    model = http.app[SERVICE].model()
    roles = model.vocabulary.roles
    return json_response(
        LlamaProps(
            LlamaDefaults(model.info.max_context),
            model.info.max_rows,
            model.name,
            model.root or model.name,
            model.vocabulary.format.template,
            roles.bos_token or "",
            roles.eos_token or "",
            f"chairlift {VERSION}",
            LlamaModalities(vision=model.vision is not None),
        )
    )


async def llama_slots(http: web.Request) -> web.Response:
    """Lists the rows. Rows are not numbered here, so the running requests get the first slots."""
    service = http.app[SERVICE]
    info = service.model().info
    running = len(service.live.riders)
    slots = [
        LlamaSlot(row, row if row < running else -1, info.max_context, row < running)
        for row in range(info.max_rows)
    ]
    return web.Response(body=msgspec.json.encode(slots), content_type="application/json")
