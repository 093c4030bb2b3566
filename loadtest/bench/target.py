"""Where requests go: vLLM's flags --backend, --base-url, --host, --port and --endpoint."""

from __future__ import annotations

import ipaddress
from typing import Literal, NamedTuple, get_args
from urllib.parse import urlsplit

from chairlift.loadtest.errors import UsageError

Backend = Literal["openai", "openai-chat", "vllm"]
BACKENDS: tuple[str, ...] = get_args(Backend)
HOST, PORT = "127.0.0.1", 8000
CHAT_ENDPOINT = "/v1/chat/completions"
_ENDPOINT = "/v1/completions"
_MAX_PORT = 65535


class Target(NamedTuple):
    """A server and the path of the requests.

    Attributes:
        backend: vLLM's name for the kind of requests.
        base_url: the server's address, without a slash at its end.
        endpoint: the path.
    """

    backend: str
    base_url: str
    endpoint: str


def find_target(
    backend: str | None,
    base_url: str | None,
    host: str | None,
    port: int | None,
    endpoint: str | None,
) -> Target:
    """The target that the flags name; None: the flag was not given.

    The backend gives the endpoint, or the endpoint the backend.

    Raises:
        UsageError: a value is invalid, or two contradict each other.
    """
    chats = is_chat(endpoint) if endpoint is not None else backend == "openai-chat"
    endpoint = endpoint or (CHAT_ENDPOINT if chats else _ENDPOINT)
    backend = backend or ("openai-chat" if chats else "openai")
    if backend not in BACKENDS:
        raise UsageError(f"--backend {backend}: not supported; choose from {', '.join(BACKENDS)}")
    if not endpoint.startswith("/") or not endpoint.endswith("/completions"):
        raise UsageError(
            "--endpoint must begin with / and end with /completions or /chat/completions,"
            f" not {endpoint}"
        )
    if chats != (backend == "openai-chat"):
        texts = "chats" if backend == "openai-chat" else "texts"
        raise UsageError(f"--backend {backend} sends {texts}, which {endpoint} does not accept")
    return Target(backend, _address(base_url, host, port), endpoint)


def is_chat(endpoint: str) -> bool:
    """Whether an endpoint takes conversations; the others take texts."""
    return endpoint.endswith("/chat/completions")


def _address(base_url: str | None, host: str | None, port: int | None) -> str:
    if base_url is None:
        return _joined(HOST if host is None else host, PORT if port is None else port)
    for flag, value in (("--host", host), ("--port", port)):
        if value is not None:
            raise UsageError(f"--base-url names host and port; leave {flag} out, or --base-url")
    try:
        parts = urlsplit(base_url)
        known = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        known = known and not any(mark in base_url for mark in "?#")
    except ValueError:
        known = False
    if not known:
        raise UsageError("--base-url must have the form http://HOST:PORT or https://HOST:PORT")
    if parts.path.rstrip("/").endswith("/v1"):
        raise UsageError("--base-url must not end in /v1, because --endpoint begins with it")
    return base_url.rstrip("/")


def _joined(host: str, port: int) -> str:
    if not 1 <= port <= _MAX_PORT:
        raise UsageError(f"--port must be between 1 and {_MAX_PORT}, not {port}")
    if not host or any(mark in host for mark in "/@?# "):
        raise UsageError(f"--host {host}: give a name or an IP address; --base-url takes addresses")
    if ":" not in host:
        return f"http://{host}:{port}"
    # An IPv6 address stands in brackets in a URL. It may have a zone: fe80::1%eth0.
    address = host.removeprefix("[").removesuffix("]")
    try:
        ipaddress.IPv6Address(address)
    except ValueError as error:
        raise UsageError(f"--host {host}: not an IPv6 address; --port takes the port") from error
    return f"http://[{address}]:{port}"
