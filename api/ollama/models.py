"""The served models in Ollama's terms, and the handlers that describe it."""

from __future__ import annotations

import asyncio
import hashlib
from datetime import UTC, datetime, timedelta

from aiohttp import web

from chairlift.api.generate.answer import json_response
from chairlift.api.generate.body import read
from chairlift.api.models.entry import ModelEntry
from chairlift.api.models.pool import LATEST
from chairlift.api.ollama.replies import (
    OllamaDetails,
    OllamaModel,
    OllamaModelInfo,
    OllamaModels,
    OllamaRunningModel,
    OllamaRunningModels,
    OllamaVersion,
)
from chairlift.api.ollama.request import OllamaShowRequest
from chairlift.api.service import SERVICE, ServedModel

# The version of Ollama whose API this server follows. Clients refuse servers with an older one than
# they need, so Chairlift's own version would mislead them.
API_VERSION = "0.12.11"
# ``expires_at`` of a model without a time limit; the field is required.
_NEVER = datetime(9999, 12, 31, 23, 59, 59, tzinfo=UTC)

# The details of a model that was never loaded.
_UNKNOWN = OllamaDetails(
    format="unknown", family="unknown", families=[], quantization_level="unknown"
)


async def ollama_tags(http: web.Request) -> web.Response:
    """Lists the models, loaded or not."""
    service = http.app[SERVICE]
    service.entry()
    return json_response(OllamaModels([_listed(entry) for entry in service.models.entries]))


def _listed(entry: ModelEntry) -> OllamaModel:
    """A model; of one that was never loaded, only name and memory are known."""
    name, model = _tagged(entry.name), entry.last
    if model is None:
        created = datetime.fromtimestamp(entry.created, UTC)
        digest = hashlib.sha256(name.encode()).hexdigest()
        return OllamaModel(name, name, created, entry.plan.memory, digest, _UNKNOWN)
    size = model.info.weight_bytes
    return OllamaModel(name, name, _created(model), size, _digest(model), _details(model))


async def ollama_ps(http: web.Request) -> web.Response:
    """Lists the loaded models."""
    service = http.app[SERVICE]
    service.entry()
    running = [
        _running(entry, entry.model)
        for entry in service.models.entries
        if entry.model is not None and entry.state == "loaded"
    ]
    return json_response(OllamaRunningModels(running))


def _running(entry: ModelEntry, model: ServedModel) -> OllamaRunningModel:
    name, info = _tagged(model.name), model.info
    return OllamaRunningModel(
        name,
        name,
        info.weight_bytes,
        _digest(model),
        _details(model),
        _expiry(entry),
        0 if info.on_cpu else info.weight_bytes,
        info.max_context,
    )


def _expiry(entry: ModelEntry) -> datetime:
    """The time at which the model is unloaded unless a request comes."""
    if entry.plan.keep_alive is None:
        return _NEVER
    idle = 0.0 if entry.is_busy else asyncio.get_running_loop().time() - entry.last_used
    return datetime.now(UTC) + timedelta(seconds=max(0.0, entry.plan.keep_alive - idle))


async def ollama_show(http: web.Request) -> web.Response:
    """Describes the model that the body names."""
    request = await read(http, OllamaShowRequest, declared=False)
    model = http.app[SERVICE].model(request.model or request.name)
    info, vocabulary = model.info, model.vocabulary
    family = info.architecture
    described = OllamaModelInfo(
        modelfile=f"FROM {model.root or model.name}\n",
        template=vocabulary.format.template,
        parameters="",
        license="",
        details=_details(model),
        model_info={
            "general.architecture": family,
            "general.basename": model.root or model.name,
            f"{family}.context_length": info.max_context,
            f"{family}.embedding_length": info.hidden_size,
            f"{family}.vocab_size": info.vocab_size,
        },
        capabilities=_capabilities(model),
        modified_at=_created(model),
    )
    return json_response(described)


async def ollama_version(http: web.Request) -> web.Response:
    """Returns the version of Ollama's API."""
    return json_response(OllamaVersion(API_VERSION))


async def ollama_running(http: web.Request) -> web.Response:
    """Answers GET / as Ollama does, on a server without the page."""
    return web.Response(text="Ollama is running")


def _capabilities(model: ServedModel) -> list[str]:
    vocabulary = model.vocabulary
    found = {
        "completion": True,
        "vision": model.vision is not None,
        # Models without a native format of calls get one in the prompt.
        "tools": vocabulary.has_chat_template,
        "thinking": vocabulary.format.thoughts is not None,
        "insert": vocabulary.fill_in is not None,
    }
    return [name for name, is_there in found.items() if is_there]


def _details(model: ServedModel) -> OllamaDetails:
    info = model.info
    return OllamaDetails(
        format=model.format,
        family=info.architecture,
        families=[info.architecture],
        quantization_level=info.dtype,
    )


def _tagged(name: str) -> str:
    """A model's name as Ollama lists names: always with a tag."""
    return name if ":" in name else name + LATEST


def _digest(model: ServedModel) -> str:
    """A digest that changes with the model. It is not the digest of the model's files."""
    return hashlib.sha256(model.fingerprint.encode()).hexdigest()


def _created(model: ServedModel) -> datetime:
    return datetime.fromtimestamp(model.created, UTC)
