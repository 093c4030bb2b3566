"""The routes as data: the app serves them, /openapi.json lists them."""

from __future__ import annotations

from collections.abc import Mapping

from chairlift.api.anthropic import handlers as anthropic
from chairlift.api.anthropic import models as anthropic_models
from chairlift.api.anthropic import replies as anthropic_replies
from chairlift.api.anthropic.errors import ANTHROPIC_ERRORS
from chairlift.api.anthropic.request import CountTokensRequest, MessagesRequest
from chairlift.api.errors import OPENAI_ERRORS, ErrorFormat
from chairlift.api.http.requests import Handler
from chairlift.api.http.sse import MESSAGES, RESPONSES
from chairlift.api.llamacpp import replies as llama_replies
from chairlift.api.llamacpp.formatter import InfillFormatter
from chairlift.api.llamacpp.prompts import apply_template, infill
from chairlift.api.llamacpp.request import ApplyTemplateRequest, InfillRequest
from chairlift.api.llamacpp.status import llama_props, llama_slots
from chairlift.api.ollama.errors import OLLAMA_ERRORS
from chairlift.api.openai import adapters
from chairlift.api.openai.batches import batch_handlers as batches
from chairlift.api.openai.batches import file_handlers as files
from chairlift.api.openai.batches import replies as batch_replies
from chairlift.api.openai.batches.request import BatchRequest
from chairlift.api.openai.chat import chat_completions
from chairlift.api.openai.completions import completions
from chairlift.api.openai.embeddings import embeddings
from chairlift.api.openai.scoring import RerankRequest, ScoreRequest, rerank, score
from chairlift.api.openai.tokens import detokenize, tokenize, tokenizer_info
from chairlift.api.responses import events as response_events
from chairlift.api.responses import handlers as responses
from chairlift.api.responses import replies as response_replies
from chairlift.api.responses.background_stream import QUERY as EVENTS_QUERY
from chairlift.api.responses.page import QUERY
from chairlift.api.responses.request import CompactRequest, InputTokensRequest, ResponsesRequest
from chairlift.api.schemas import replies, schemas
from chairlift.api.schemas.request import Request
from chairlift.api.server.ollama_routes import OLLAMA_ROUTES
from chairlift.api.server.route import Route
from chairlift.api.server.status import (
    get_model,
    health,
    list_models,
    load_model,
    unload_model,
    version,
)


def _refused(path: str, handler: Handler, request: type[Request]) -> Route:
    """A route that no served model can answer."""
    summary = "Refused, as no model kind of this server scores texts"
    return Route("POST", path, handler, summary, replies.ErrorReply, request)


_MODELS = "/v1/models"
_FILE = "/v1/files/{file_id}"
_BATCH = "/v1/batches/{batch_id}"
_STORED = "/v1/responses/{response_id}"

ROUTES: tuple[Route, ...] = (
    Route(
        "POST",
        "/v1/chat/completions",
        chat_completions,
        "Answer a conversation",
        replies.ChatCompletion,
        schemas.ChatRequest,
        (replies.ChatChunk, replies.ErrorReply),
    ),
    Route(
        "POST",
        "/v1/completions",
        completions,
        "Continue prompts",
        replies.Completion,
        schemas.CompletionRequest,
        (replies.Completion, replies.ErrorReply),
    ),
    Route(
        "POST",
        "/v1/responses",
        responses.create_response,
        "Generate a response to items, perhaps continuing an earlier response",
        response_replies.Response,
        ResponsesRequest,
        response_events.EVENTS,
        framing=RESPONSES,
    ),
    Route(
        "POST",
        "/v1/responses/input_tokens",
        responses.count_input_tokens,
        "Count the tokens of a response's prompt",
        response_replies.InputTokens,
        InputTokensRequest,
    ),
    Route(
        "POST",
        "/v1/responses/compact",
        responses.compact_response,
        "Replace a conversation by a summary to continue from",
        response_replies.CompactedResponse,
        CompactRequest,
    ),
    Route(
        "GET",
        _STORED,
        responses.get_response,
        "Get a stored response, or one that is generated in the background",
        response_replies.Response,
        chunks=response_events.EVENTS,
        query=EVENTS_QUERY,
    ),
    Route(
        "DELETE",
        _STORED,
        responses.delete_response,
        "Delete a stored response",
        response_replies.DeletedResponse,
    ),
    Route(
        "GET",
        _STORED + "/input_items",
        responses.list_input_items,
        "List the input items of a stored response",
        response_replies.InputItemList,
        query=QUERY,
    ),
    Route(
        "POST",
        _STORED + "/cancel",
        responses.cancel_response,
        "Cancel a response that is generated in the background",
        response_replies.Response,
    ),
    Route(
        "POST",
        "/v1/messages",
        anthropic.create_message,
        "Answer a conversation, in Anthropic's format",
        anthropic_replies.AnthropicMessage,
        MessagesRequest,
        anthropic_replies.EVENTS,
        ANTHROPIC_ERRORS,
        MESSAGES,
    ),
    Route(
        "POST",
        "/v1/messages/count_tokens",
        anthropic.count_tokens,
        "Count the tokens of a conversation",
        anthropic_replies.TokensCount,
        CountTokensRequest,
        error_format=ANTHROPIC_ERRORS,
    ),
    Route(
        "POST",
        "/v1/embeddings",
        embeddings,
        "Compute embeddings of texts",
        replies.EmbeddingList,
        schemas.EmbeddingRequest,
    ),
    Route(
        "POST",
        "/v1/files",
        files.upload_file,
        "Upload a file",
        batch_replies.FileObject,
        form=files.UPLOAD_FORM,
    ),
    Route(
        "GET",
        "/v1/files",
        files.list_files,
        "List the files",
        batch_replies.FileList,
        query=files.LIST_QUERY,
    ),
    Route("GET", _FILE, files.get_file, "Describe a file", batch_replies.FileObject),
    Route("DELETE", _FILE, files.delete_file, "Delete a file", batch_replies.DeletedFile),
    Route("GET", _FILE + "/content", files.get_file_content, "Get a file's content", None),
    Route(
        "POST",
        "/v1/batches",
        batches.create_batch,
        "Begin a batch of the requests in a file",
        batch_replies.Batch,
        BatchRequest,
    ),
    Route(
        "GET",
        "/v1/batches",
        batches.list_batches,
        "List the batches",
        batch_replies.BatchList,
        query=batches.BATCH_QUERY,
    ),
    Route("GET", _BATCH, batches.get_batch, "Describe a batch", batch_replies.Batch),
    Route("POST", _BATCH + "/cancel", batches.cancel_batch, "Cancel a batch", batch_replies.Batch),
    _refused("/v1/rerank", rerank, RerankRequest),
    _refused("/v2/rerank", rerank, RerankRequest),
    _refused("/v1/score", score, ScoreRequest),
    *OLLAMA_ROUTES,
    Route(
        *("GET", _MODELS, list_models, "List the models", replies.ModelList),
        query=anthropic_models.PAGE_QUERY,
        anthropic_reply=anthropic_models.AnthropicModelList,
    ),
    Route(
        *("GET", _MODELS + "/{id}", get_model, "Describe a model", replies.ModelCard),
        anthropic_reply=anthropic_models.AnthropicModel,
    ),
    Route("POST", "/v1/models/{id}/load", load_model, "Load a model", replies.ModelCard),
    Route("POST", "/v1/models/{id}/unload", unload_model, "Unload a model", replies.ModelCard),
    Route(
        *("POST", "/v1/load_lora_adapter", adapters.load_lora_adapter, "Load a LoRA adapter"),
        *(replies.ModelCard, adapters.LoadAdapterRequest),
    ),
    Route(
        *("POST", "/v1/unload_lora_adapter", adapters.unload_lora_adapter, "Unload an adapter"),
        *(replies.UnloadedAdapter, adapters.UnloadAdapterRequest),
    ),
    Route(
        *("POST", "/tokenize", tokenize, "Tokenize a text or a conversation"),
        *(replies.TokenizeReply, schemas.TokenizeRequest),
    ),
    Route(
        *("POST", "/detokenize", detokenize, "Convert tokens to text"),
        *(replies.DetokenizeReply, schemas.DetokenizeRequest),
    ),
    Route(
        *("GET", "/tokenizer_info", tokenizer_info, "Get the tokenizer's special tokens"),
        replies.TokenizerInfo,
    ),
    Route(
        "POST",
        "/apply-template",
        apply_template,
        "Render a conversation as text",
        llama_replies.LlamaPrompt,
        ApplyTemplateRequest,
    ),
    Route(
        "POST",
        "/infill",
        infill,
        "Write the text between two texts",
        llama_replies.LlamaInfill,
        InfillRequest,
        (llama_replies.LlamaInfillPiece, llama_replies.LlamaInfill, replies.ErrorReply),
        framing=InfillFormatter.framing,
    ),
    Route("GET", "/props", llama_props, "Get llama.cpp's properties", llama_replies.LlamaProps),
    Route("GET", "/slots", llama_slots, "List the rows", llama_replies.LlamaSlot, is_list=True),
    Route(
        "GET",
        "/health",
        health,
        "Check whether requests can be served",
        replies.HealthReply,
        is_free=True,
    ),
    Route("GET", "/ping", health, "The same as /health", replies.HealthReply, is_free=True),
    Route("POST", "/ping", health, "The same as /health", replies.HealthReply, is_free=True),
    Route("GET", "/version", version, "Get the version", replies.VersionReply, is_free=True),
)

# Ollama's API has further routes, for managing models, which this server lacks.
_OTHER_FORMATS = {"/api": OLLAMA_ERRORS} | {
    route.path: route.error_format for route in ROUTES if route.error_format != OPENAI_ERRORS
}


def error_format_of(path: str, headers: Mapping[str, str]) -> ErrorFormat:
    """The error format of a request, whose path may match no route.

    A path below a route that has another format than OpenAI's gets that format, too: it comes from
    a client of that API.
    """
    for prefix, error_format in _OTHER_FORMATS.items():
        if _is_below(path, prefix):
            return error_format
    is_anthropic = anthropic_models.VERSION_HEADER in headers and _is_below(path, _MODELS)
    return ANTHROPIC_ERRORS if is_anthropic else OPENAI_ERRORS


def _is_below(path: str, prefix: str) -> bool:
    return path == prefix or path.startswith(f"{prefix}/")
