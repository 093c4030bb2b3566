"""Values at the limits of every numeric field of a request: just inside and just outside."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

# For float64 and float32: the smallest number, the smallest normal one, and one in between.
_SUBNORMAL = (5e-324, 1e-320, 2.2250738585072014e-308, 1e-45, 1e-40, 1.17549435e-38, 1e-30)
_INT32, _INT64 = 2**31, 2**63


@dataclass(frozen=True, slots=True)
class Odd:
    """The values of a field: ``inside`` must be accepted, ``outside`` refused with a 400."""

    name: str
    inside: tuple[Any, ...]
    outside: tuple[Any, ...] = ()


def sampling(vocabulary: int) -> tuple[Odd, ...]:
    """The fields of all endpoints."""
    return (
        Odd(
            "temperature",
            (
                *(*_SUBNORMAL, 0, 0.0, -0.0, 1e-10, 9.999e-6, 1e-5, 1.0001e-5, 1e-4, 0.01),
                *(0.5, 1.0, 1.9999999999999998, 2),
            ),
            (2.0000001, -5e-324, -1e-40, 1e308, -1e308, 10**400, "1"),
        ),
        Odd(
            "top_p",
            (0, -0.0, *_SUBNORMAL, 1e-10, 1e-7, 0.5, 0.9999999, 0.9999999999999999, 1),
            (1.0000000000000002, -5e-324, -1e-40, 1e308),
        ),
        Odd(
            "top_k",
            (-1, 0, -0.0, 1, 2.0, vocabulary - 1, vocabulary, vocabulary + 1, _INT32 - 1),
            (-2, _INT32, 2**32, _INT64, 1.5),
        ),
        Odd("priority", (-100, 0, 100), (-101, 101, _INT64)),
        Odd("cache_salt", ("a", "b" * 256), ("", "c" * 257)),
    )


def openai(vocabulary: int, rows: int) -> tuple[Odd, ...]:
    """The fields of completions and chat completions."""
    last = str(vocabulary - 1)
    ends = list(range(min(128, vocabulary)))
    return (
        *sampling(vocabulary),
        Odd(
            "min_p",
            (*_SUBNORMAL, 0, -0.0, 1e-10, 0.5, 0.9999999, 0.9999999999999999, 1),
            (1.0000000000000002, -5e-324, 1e308),
        ),
        Odd(
            "repetition_penalty",
            (0.01, 0.010000000000000002, 0.5, 1, 1.0000001, 99.99999999999999, 100),
            (0, 5e-324, 0.009999999999999998, 100.00000000000001, 1e308, -1),
        ),
        *(
            Odd(
                name,
                (-2, -1e-40, -0.0, 0, *_SUBNORMAL, 1.9999999999999998, 2),
                (-2.0000000000000004, 2.0000000000000004, 1e308, -1e308),
            )
            for name in ("presence_penalty", "frequency_penalty")
        ),
        Odd(
            "logit_bias",
            (
                *({}, {"0": 100}, {"0": -100}, {last: 100.0}, {last: 5e-324, "0": -1e-40}),
                *({str(t): -100 for t in range(min(1024, vocabulary))}, {"0": -0.0, "1": 100}),
            ),
            (
                *({str(vocabulary): 1}, {"999999999": 1}, {"-1": 1}, {"0": 100.00000000000001}),
                *({"0": 1e308}, {str(t): 0 for t in range(1025)}, {"9999999999": 0}),
            ),
        ),
        Odd(
            "seed",
            (0, -1, 1, _INT32, 2**32, 2**53 + 1, 1e18, _INT64 - 1, -_INT64),
            (_INT64, -_INT64 - 1, 2**64, 10**30, 1e30, 0.5),
        ),
        Odd("max_tokens", (1, 2.0, 7), (1.5, _INT32 - 1, _INT32, -1, _INT64)),
        Odd("min_tokens", (0, 1), (_INT32 - 1, _INT32, -1)),
        Odd(
            "stop_token_ids",
            ([], [0], [vocabulary - 1], ends, [0] * 128),
            ([vocabulary], [_INT32 - 1], [_INT32], [-1], [0] * 129),
        ),
        Odd("stop", ([], "a", ["e"] * 16, "x" * 1024), ("", ["e"] * 17, "x" * 1025)),
        Odd("n", (1, 2, 3, rows), (0, rows + 1, 128, 129, _INT32, -1)),
        Odd("ignore_eos", (True, False)),
        Odd("skip_special_tokens", (True, False)),
        Odd("stream", (True, False)),
    )


def completions(vocabulary: int, rows: int) -> tuple[Odd, ...]:
    """The fields of /v1/completions."""
    ids = [0, vocabulary - 1, 1]
    return (
        *openai(vocabulary, rows),
        Odd("logprobs", (0, 1, 19, 20), (21, -1, _INT32, _INT64)),
        Odd("echo", (True, False)),
        Odd(
            "prompt",
            ("a", ids, [vocabulary - 1], [0] * 130, [ids, [1]], ["a", "b c"]),
            ([vocabulary], [-1], [_INT32], [_INT64], [0, 2**64], [], [ids, [vocabulary]]),
        ),
    )


def chat(vocabulary: int, rows: int) -> tuple[Odd, ...]:
    """The fields of /v1/chat/completions; the request has logprobs, which top_logprobs needs."""
    return (
        *openai(vocabulary, rows),
        Odd("top_logprobs", (0, 1, 19, 20), (21, -1, _INT32)),
        Odd("thinking_token_budget", (), (-1, _INT32)),
    )


def responses(vocabulary: int) -> tuple[Odd, ...]:
    """The fields of /v1/responses."""
    return (
        *sampling(vocabulary),
        Odd("max_output_tokens", (1, 2, 7), (0, _INT32 - 1, _INT32, -1)),
        Odd("top_logprobs", (0, 1, 20), (21, -1, _INT32)),
        Odd("stream", (True, False)),
    )


def messages(vocabulary: int) -> tuple[Odd, ...]:
    """The fields of /v1/messages."""
    return (
        *sampling(vocabulary),
        # A max_tokens beyond the context is lowered to it, as at Anthropic: hundreds of tokens.
        Odd("max_tokens", (1, 2, 7), (0, _INT32, -1)),
        Odd("stop_sequences", ([], ["e"] * 16, ["x" * 1024]), ([""], ["e"] * 17)),
        Odd("stream", (True, False)),
    )
