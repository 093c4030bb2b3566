"""POST /v1/load_lora_adapter and /v1/unload_lora_adapter, as in vLLM."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated

from aiohttp import web
from pydantic import Field

from chairlift.api.errors import NotAllowed, UnknownModel
from chairlift.api.generate.answer import json_response
from chairlift.api.generate.body import read
from chairlift.api.schemas.replies import ModelCard, UnloadedAdapter
from chairlift.api.schemas.request import Request
from chairlift.api.service import SERVICE, ServedModel, Service
from chairlift.engine.client.adapters import MAX_NAME_CHARS
from chairlift.engine.errors import AdapterError

_MAX_PATH_CHARS = 4096

Name = Annotated[str, Field(min_length=1, max_length=MAX_NAME_CHARS)]


class LoadAdapterRequest(Request):
    """POST /v1/load_lora_adapter. ``model`` is an extension: the model that is adapted."""

    lora_name: Name
    lora_path: Annotated[str, Field(min_length=1, max_length=_MAX_PATH_CHARS)]
    load_inplace: bool = False
    model: str | None = None


class UnloadAdapterRequest(Request):
    """POST /v1/unload_lora_adapter. ``model`` is an extension: the model that is adapted."""

    lora_name: Name
    model: str | None = None


async def load_lora_adapter(http: web.Request) -> web.Response:
    """Loads an adapter from below the folder of ``--lora-dir``."""
    request = await read(http, LoadAdapterRequest)
    service = http.app[SERVICE]
    model = service.model(request.model)
    root = _root(service)
    if service.models.has_model(request.lora_name):
        raise AdapterError(f"a model has the name {request.lora_name!r}")
    folder = await asyncio.to_thread(folder_below, root, request.lora_path)
    base = model.base or model
    adapted = await base.load_adapter(request.lora_name, folder, request.load_inplace)
    return json_response(adapter_card(adapted))


async def unload_lora_adapter(http: web.Request) -> web.Response:
    """Unloads an adapter; requests that have it are finished first."""
    request = await read(http, UnloadAdapterRequest)
    service = http.app[SERVICE]
    _root(service)
    adapters = service.model(request.model).adapters
    if adapters is None or request.lora_name not in adapters.loaded:
        raise UnknownModel(f"the adapter {request.lora_name!r} does not exist", "lora_name")
    adapters.unload(request.lora_name)
    return json_response(UnloadedAdapter(request.lora_name))


def folder_below(root: Path, path: str) -> Path:
    """The folder that a request names, if it and its files are below ``root``.

    Raises:
        AdapterError: they are not, whether they exist or not.
    """
    refused = AdapterError("lora_path has to be a folder below that of --lora-dir")
    try:
        root = root.resolve(strict=True)
        folder = (root / path).resolve()
        # Links to files elsewhere would be read, too.
        files = [file.resolve() for file in folder.iterdir()] if folder.is_relative_to(root) else []
    except (OSError, RuntimeError, ValueError) as error:  # no folder, a loop of links, a null byte
        raise refused from error
    if not files or not all(file.is_relative_to(root) for file in files):
        raise refused
    return folder


def _root(service: Service) -> Path:
    """The folder of the adapters that requests may load.

    Raises:
        NotAllowed: they may load and unload none.
    """
    root = service.settings.lora_dir
    if root is None:
        raise NotAllowed("adapters cannot be loaded by requests: the server has no --lora-dir")
    return root


def adapter_card(model: ServedModel) -> ModelCard:
    """The entry in /v1/models of a model with an adapter."""
    assert model.adapter is not None
    assert model.base is not None
    context = model.info.max_context
    card = ModelCard(model.name, model.created, context, model.adapter.path, model.defaults)
    card.parent = model.base.name
    card.input_modalities = model.input_modalities
    return card
