"""Handlers of POST /apply-template and /infill."""

from __future__ import annotations

from aiohttp import web

from chairlift.api.admission.deadline import DEADLINE
from chairlift.api.chat.prepare import rendered_text
from chairlift.api.generate.answer import answer, json_response
from chairlift.api.generate.body import read
from chairlift.api.generate.continuation import prepare_continuation
from chairlift.api.llamacpp.formatter import InfillFormatter
from chairlift.api.llamacpp.replies import LlamaPrompt
from chairlift.api.llamacpp.request import ApplyTemplateRequest, InfillRequest
from chairlift.api.schemas.names import renamed_errors
from chairlift.api.schemas.schemas import CompletionRequest, GenerationRequest
from chairlift.api.service import SERVICE, ServedModel
from chairlift.api.text.fill_in import fill_in_prompt


async def apply_template(http: web.Request) -> web.Response:
    """Renders a conversation with the model's chat template, as text."""
    request = await read(http, ApplyTemplateRequest)
    model = http.app[SERVICE].model(request.model)
    async with http[DEADLINE].limit():
        text = await rendered_text(request.messages, request, model)
    return json_response(LlamaPrompt(text))


async def infill(http: web.Request) -> web.StreamResponse:
    """Writes the text between two texts."""
    request = await read(http, InfillRequest)
    model = http.app[SERVICE].model(request.model)
    async with http[DEADLINE].limit():
        prompt = await _prompt(request, model)
    completion = completion_request(request, prompt)
    # Like llama.cpp, accept an n_predict that exceeds the context.
    limit = request.n_predict if request.n_predict is not None else request.max_tokens
    limit = None if limit is None or limit < 0 else limit
    # Here, "prompt" is another field.
    with renamed_errors({"prompt": "input_prefix"}):
        generation = await prepare_continuation(http, completion, "infill-", limit, fills_in=True)
    return await answer(http, completion, generation, InfillFormatter(generation))


def completion_request(request: InfillRequest, prompt: list[int]) -> CompletionRequest:
    """The completion that continues the token ids ``prompt``. Its ``max_tokens`` is absent."""
    shared = GenerationRequest.model_fields.keys() - {"max_tokens"}
    given = request.model_fields_set & shared
    fields = {name: getattr(request, name) for name in given}
    if request.repeat_penalty is not None:
        fields["repetition_penalty"] = request.repeat_penalty
    # The fields have been validated: both kinds of request inherit them.
    fields |= {"prompt": [prompt], "add_special_tokens": False}
    return CompletionRequest.model_construct(set(fields), **fields)


async def _prompt(request: InfillRequest, model: ServedModel) -> list[int]:
    """The token ids of the prompt.

    Raises:
        PromptTooLong: the texts cannot fit the context.
        RequestError: the model has no tokens to fill in text.
    """
    vocabulary = model.vocabulary
    # Files before the gap's own are plain text before it, as for models without repository marks.
    files = [f"{extra.filename}\n{extra.text}\n" for extra in request.input_extra]
    before = "".join([*files, request.input_prefix])
    chars = len(before) + len(request.input_suffix) + len(request.prompt)
    vocabulary.check_chars(chars, model.info.max_context, "input_prefix")
    return await fill_in_prompt(
        vocabulary, before, request.input_suffix, "/infill", begun=request.prompt
    )
