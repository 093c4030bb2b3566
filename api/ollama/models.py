"""The served model in Ollama's terms, and the handlers that describe it."""

from __future__ import annotations

import hashlib
from datetime import UTC, datetime

from aiohttp import web

from chairlift.api.generate.answer import json_response
from chairlift.api.generate.body import read
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
# Ollama's tag of a model that is named without one.
_LATEST = ":latest"
# The model stays loaded; the field is required.
_NEVER = datetime(9999, 12, 31, 23, 59, 59, tzinfo=UTC)


def served_model(http: web.Request, name: str | None) -> ServedModel:
    """The model that a request names, with or without the tag "latest".

    Raises:
        NotReady, UnknownModel: as ``Service.model``.
    """
    service = http.app[SERVICE]
    model = service.model()
    return model if name in (model.name, model.name + _LATEST) else service.model(name)


async def ollama_tags(http: web.Request) -> web.Response:
    """Lists the served model."""
    model = http.app[SERVICE].model()
    name, size = _tagged(model), model.info.weight_bytes
    listed = OllamaModel(name, name, _created(model), size, _digest(model), _details(model))
    return json_response(OllamaModels([listed]))


async def ollama_ps(http: web.Request) -> web.Response:
    """Lists the loaded model, which is the served one."""
    model = http.app[SERVICE].model()
    name, info = _tagged(model), model.info
    on_gpu = info.device.lower() != "cpu"
    running = OllamaRunningModel(
        name,
        name,
        info.weight_bytes,
        _digest(model),
        _details(model),
        _NEVER,
        info.weight_bytes if on_gpu else 0,
        info.max_context,
    )
    return json_response(OllamaRunningModels([running]))


async def ollama_show(http: web.Request) -> web.Response:
    """Describes the model that the body names."""
    request = await read(http, OllamaShowRequest)
    model = served_model(http, request.model or request.name)
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
        # Models without a native format of calls get one in the prompt.
        "tools": vocabulary.has_chat_template,
        "thinking": vocabulary.format.thoughts is not None,
        "insert": vocabulary.fill_in is not None,
    }
    return [name for name, is_there in found.items() if is_there]


def _details(model: ServedModel) -> OllamaDetails:
    info = model.info
    source = model.root or model.name
    return OllamaDetails(
        format="gguf" if source.lower().endswith(".gguf") else "safetensors",
        family=info.architecture,
        families=[info.architecture],
        quantization_level=info.dtype,
    )


def _tagged(model: ServedModel) -> str:
    """The model's name as Ollama lists names: always with a tag."""
    return model.name if ":" in model.name else model.name + _LATEST


def _digest(model: ServedModel) -> str:
    """It changes with the model; it is not that of its files."""
    return hashlib.sha256(model.fingerprint.encode()).hexdigest()


def _created(model: ServedModel) -> datetime:
    return datetime.fromtimestamp(model.created, UTC)
