"""Handlers of /v1/files. A key sees its own files only."""

from __future__ import annotations

import asyncio
from pathlib import Path

from aiohttp import web

from chairlift.api.admission.ratelimit import ACCOUNT
from chairlift.api.generate.answer import json_response
from chairlift.api.openai.batches.replies import DeletedFile, FileList
from chairlift.api.openai.batches.storage import STORAGE, Tables
from chairlift.api.openai.batches.upload import DEFAULT_SECONDS, MIN_SECONDS, PURPOSE, receive
from chairlift.api.schemas.paging import ends_of, page_of, query_schema
from chairlift.api.service import SERVICE
from chairlift.engine.errors import QueueFull, RequestError

MAX_PAGE = 10_000
# Uploads that are not complete count against no limit of the folder, so their number has one.
MAX_UPLOADS = 8
UPLOAD_RETRY_SECONDS = 5.0
# An upload's other fields and their boundaries have fewer bytes.
FORM_BYTES = 4096
_PURPOSES = ("batch", "batch_output")
# JSON schemas of the list's query and of an upload's fields.
LIST_QUERY: dict[str, dict[str, object]] = {
    **query_schema(MAX_PAGE, MAX_PAGE),
    "purpose": {"enum": list(_PURPOSES)},
}
UPLOAD_FORM: dict[str, dict[str, object]] = {
    "file": {"type": "string", "format": "binary"},
    "purpose": {"enum": [PURPOSE]},
    "expires_after[anchor]": {"enum": ["created_at"]},
    "expires_after[seconds]": {
        "type": "integer",
        "minimum": MIN_SECONDS,
        "maximum": DEFAULT_SECONDS,
    },
}


async def upload_file(http: web.Request) -> web.Response:
    """Stores an uploaded file."""
    storage, settings = http.app[STORAGE], http.app[SERVICE].settings
    owner = http[ACCOUNT].name
    if storage.uploads >= MAX_UPLOADS:
        raise QueueFull(f"{MAX_UPLOADS} files are being uploaded already", UPLOAD_RETRY_SECONDS)
    declared = max(0, min(http.content_length or 0, settings.max_file_bytes) - FORM_BYTES)

    def begin(tables: Tables) -> Path:
        tables.files.check_room(declared)
        return tables.folder.new_incoming()

    storage.uploads += 1
    try:
        incoming = await storage.run(begin)
        try:
            upload = await receive(http, incoming, settings.max_file_bytes, settings.body_seconds)
            file = await storage.run(
                lambda tables: tables.files.upload(owner, upload.filename, upload.seconds, incoming)
            )
        finally:
            # After a success it has been moved away.
            await asyncio.shield(asyncio.to_thread(incoming.unlink, missing_ok=True))
    finally:
        storage.uploads -= 1
    return json_response(file)


async def list_files(http: web.Request) -> web.Response:
    """Lists the files, the newest first unless the query says otherwise."""
    owner = http[ACCOUNT].name
    page = page_of(http.query, MAX_PAGE, MAX_PAGE)
    purpose = http.query.get("purpose")
    if purpose is not None and purpose not in _PURPOSES:
        raise RequestError(f"purpose: must be {' or '.join(_PURPOSES)}", "purpose")
    files, has_more = await http.app[STORAGE].run(
        lambda tables: tables.files.page(owner, purpose, page)
    )
    first, last = ends_of([file.id for file in files])
    return json_response(FileList(files, first, last, has_more))


async def get_file(http: web.Request) -> web.Response:
    """Describes a file."""
    owner, file_id = http[ACCOUNT].name, http.match_info["file_id"]
    return json_response(
        await http.app[STORAGE].run(lambda tables: tables.files.get(owner, file_id))
    )


async def get_file_content(http: web.Request) -> web.StreamResponse:
    """Sends a file's content."""
    owner, file_id = http[ACCOUNT].name, http.match_info["file_id"]
    path = await http.app[STORAGE].run(lambda tables: tables.files.content(owner, file_id))
    return web.FileResponse(path, headers={"Content-Type": "application/octet-stream"})


async def delete_file(http: web.Request) -> web.Response:
    """Deletes a file, unless a batch still reads it."""
    owner, file_id = http[ACCOUNT].name, http.match_info["file_id"]
    await http.app[STORAGE].run(lambda tables: tables.files.delete(owner, file_id))
    return json_response(DeletedFile(file_id))
