"""Handlers of /v1/batches. A key sees its own batches only."""

from __future__ import annotations

import time
import uuid

from aiohttp import web

from chairlift.api.admission.ratelimit import ACCOUNT
from chairlift.api.generate.answer import json_response
from chairlift.api.generate.body import read
from chairlift.api.openai.batches.replies import Batch, BatchList, RequestCounts
from chairlift.api.openai.batches.request import BatchRequest, window_seconds
from chairlift.api.openai.batches.runner import BATCH_RUNNER
from chairlift.api.openai.batches.storage import STORAGE
from chairlift.api.openai.batches.upload import DEFAULT_SECONDS
from chairlift.api.schemas.paging import ends_of, page_of, query_schema
from chairlift.api.service import SERVICE

DEFAULT_PAGE = 20
MAX_PAGE = 100
BATCH_QUERY = query_schema(DEFAULT_PAGE, MAX_PAGE)


async def create_batch(http: web.Request) -> web.Response:
    """Begins a batch of the requests in a file."""
    request = await read(http, BatchRequest)
    owner = http[ACCOUNT].name
    model = http.app[SERVICE].entry()
    now = int(time.time())
    batch = Batch(
        id=f"batch_{uuid.uuid4().hex}",
        endpoint=request.endpoint,
        model=model.name,
        input_file_id=request.input_file_id,
        completion_window=request.completion_window,
        created_at=now,
        expires_at=now + window_seconds(request.completion_window),
        metadata=request.metadata,
        request_counts=RequestCounts(),
    )
    expiry = request.output_expires_after
    seconds = DEFAULT_SECONDS if expiry is None else expiry.seconds
    created = await http.app[STORAGE].run(
        lambda tables: tables.batches.create(owner, batch, seconds)
    )
    http.app[BATCH_RUNNER].wake()
    return json_response(created)


async def list_batches(http: web.Request) -> web.Response:
    """Lists the batches, the newest first."""
    owner = http[ACCOUNT].name
    page = page_of(http.query, DEFAULT_PAGE, MAX_PAGE)
    batches, has_more = await http.app[STORAGE].run(lambda tables: tables.batches.page(owner, page))
    first, last = ends_of([batch.id for batch in batches])
    return json_response(BatchList(batches, first, last, has_more))


async def get_batch(http: web.Request) -> web.Response:
    """Describes a batch."""
    owner, batch_id = http[ACCOUNT].name, http.match_info["batch_id"]
    return json_response(
        await http.app[STORAGE].run(lambda tables: tables.batches.get(owner, batch_id))
    )


async def cancel_batch(http: web.Request) -> web.Response:
    """Cancels a batch; the results so far are kept."""
    owner, batch_id = http[ACCOUNT].name, http.match_info["batch_id"]
    batch = await http.app[STORAGE].run(lambda tables: tables.batches.cancel(owner, batch_id))
    http.app[BATCH_RUNNER].wake()
    return json_response(batch)
