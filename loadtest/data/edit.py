"""The data set edit: a document is to come back with a small change.

Each document is a module of Python functions, made of random words. The prompt contains it and asks
for a copy with one function renamed, so that nearly all of the reply is known beforehand.
"""

from __future__ import annotations

import asyncio
import keyword
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from chairlift.loadtest.data.words import WORDS
from chairlift.loadtest.data.workload import TokenCounter, WorkloadRequest

_NAMES = [word for word in WORDS if not keyword.iskeyword(word)]
# About as many tokens as a function has with the tokenizers of today's models.
_FUNCTION_TOKENS = 75
_SIZING_ROUNDS = 3
_SIZING_CONCURRENCY = 16
# The copy may be a little longer than its document: the new name, and the end of the block.
_MORE_TOKENS = 16

_FUNCTION = '''\
def {name}({one}, {two}):
    """Return the {three} of the {one} and the {two}."""
    {three} = {one} * {a} + {two}
    for {four} in range({b}):
        if {four} > {three}:
            {three} = {three} + {four} - {c}
    return {three}
'''
_PROMPT = """\
Here is a file:

```python
{document}```

Repeat the whole file with the function {old} renamed to {new}. Change nothing else.
"""
_BEGUN = """
Here is the whole file again, with {new} in place of {old}:

```python
"""


async def edit_requests(
    count: int,
    length: int,
    chat: bool,
    predict: bool,
    rng: np.random.Generator,
    count_tokens: TokenCounter,
    built: Callable[[], None],
) -> list[WorkloadRequest]:
    """Builds prompts, each with a document of its own.

    Args:
        count: the number of prompts.
        length: about the tokens of a document, and of the reply.
        chat: the prompts are messages; otherwise they also begin the reply.
        predict: the requests have the document as their ``prediction``.
        rng: the generator.
        count_tokens: counts tokens with the server's tokenizer.
        built: called after each request.
    """
    limit = asyncio.Semaphore(_SIZING_CONCURRENCY)

    async def build(stream: np.random.Generator) -> WorkloadRequest:
        async with limit:
            functions = await _module(length, stream, count_tokens)
            document = "\n\n".join(functions)
            prompt = _prompt(functions, stream, chat)
            tokens = await count_tokens(prompt)
            built()
            prompt_len = len(prompt.split()) if tokens is None else tokens
            request = WorkloadRequest(prompt, prompt_len, length + _MORE_TOKENS)
            if predict:
                body = {"prediction": {"type": "content", "content": document}}
                request = replace(request, body=body)
            return request

    return await asyncio.gather(*map(build, rng.spawn(count)))


async def _module(length: int, rng: np.random.Generator, count_tokens: TokenCounter) -> list[str]:
    """The functions of a document of about ``length`` tokens, at least one."""
    functions = [_function(rng) for _ in range(max(1, round(length / _FUNCTION_TOKENS)))]
    for _ in range(_SIZING_ROUNDS):
        tokens = await count_tokens("\n\n".join(functions))
        if not tokens:
            break
        wanted = max(1, round(length * len(functions) / tokens))
        if wanted == len(functions):
            break
        functions += [_function(rng) for _ in range(wanted - len(functions))]
        del functions[wanted:]
    return functions


def _prompt(functions: list[str], rng: np.random.Generator, chat: bool) -> str:
    chosen = functions[rng.integers(len(functions))]
    old = chosen[len("def ") : chosen.index("(")]
    names = {"old": old, "new": "_".join(_words(2, rng))}
    prompt = _PROMPT.format(document="\n\n".join(functions), **names)
    return prompt if chat else prompt + _BEGUN.format(**names)


def _function(rng: np.random.Generator) -> str:
    one, two, three, four, *name = _words(6, rng)
    a, b, c = (int(n) for n in rng.integers(2, 1000, size=3))
    return _FUNCTION.format(
        name="_".join(name), one=one, two=two, three=three, four=four, a=a, b=b, c=c
    )


def _words(count: int, rng: np.random.Generator) -> list[str]:
    """Different words that are names in Python."""
    return [str(word) for word in rng.choice(_NAMES, count, replace=False)]
