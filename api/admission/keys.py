"""API keys and their limits, from a TOML file, flags or variables, and compared by hash."""

from __future__ import annotations

import hashlib
import hmac
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import count
from pathlib import Path

KEY_VARIABLE = "CHAIRLIFT_API_KEY"
# Read after KEY_VARIABLE, by servers and clients alike.
OPENAI_VARIABLE = "OPENAI_API_KEY"
# The name of a key that is in no file.
GIVEN_NAME = "default"
# Shorter keys can be guessed.
MIN_KEY_CHARS = 8
_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")


class KeyFileError(Exception):
    """The key file cannot be read or is invalid. The message is one line."""


@dataclass(frozen=True, slots=True)
class KeyLimits:
    """The limits of one key; None means unlimited.

    Attributes:
        rpm: requests a minute.
        tpm: prompt and output tokens a minute.
        max_streams: choices that are waiting or generating at the same time, n for each prompt.
    """

    rpm: int | None = None
    tpm: int | None = None
    max_streams: int | None = None


NO_LIMITS = KeyLimits()


@dataclass(frozen=True, slots=True)
class ApiKey:
    """A named key. Only its SHA-256 ``digest`` is kept, never the key itself."""

    name: str
    digest: bytes
    limits: KeyLimits


def digest_of(key: str) -> bytes:
    """The SHA-256 of a key."""
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def find_key(keys: Sequence[ApiKey], given: str) -> ApiKey | None:
    """The key that ``given`` matches, or None."""
    digest = digest_of(given)
    found = None
    # Compare with all keys, each in constant time, so that the duration reveals nothing.
    for key in keys:
        if hmac.compare_digest(key.digest, digest):
            found = key
    return found


def given_keys(keys: Sequence[str], limits: KeyLimits) -> tuple[ApiKey, ...]:
    """Keys from flags or the environment, named "default", "default-2" and so on.

    Raises:
        KeyFileError: a key is too short.
    """
    if any(len(key) < MIN_KEY_CHARS for key in keys):
        raise KeyFileError(
            f"a key of --api-key or {KEY_VARIABLE} has fewer than {MIN_KEY_CHARS} characters"
        )
    names = (GIVEN_NAME if number == 1 else f"{GIVEN_NAME}-{number}" for number in count(1))
    return tuple(
        ApiKey(name, digest_of(key), limits)
        for name, key in zip(names, dict.fromkeys(keys), strict=False)
    )


def read_keys(
    path: Path | None, defaults: KeyLimits, given: Sequence[ApiKey] = ()
) -> tuple[ApiKey, ...]:
    """The keys of the file, and those of ``given_keys``.

    The file is TOML with one table per key, named like the key. A table holds ``key`` or its
    ``sha256`` in hexadecimal, and may override ``defaults`` (``rpm``, ``tpm``, ``max_streams``;
    0 means unlimited).

    Raises:
        KeyFileError: the file cannot be read or is invalid.
    """
    keys = [*(() if path is None else _keys_in_file(path, defaults)), *given]
    for index, key in enumerate(keys):
        for other in keys[:index]:
            if key.name == other.name or key.digest == other.digest:
                raise KeyFileError(f"the keys {other.name!r} and {key.name!r} are the same")
    return tuple(keys)


def first_key(environment: Mapping[str, str]) -> str | None:
    """The key that a client sends: the first of the variables that are set."""
    for variable in (KEY_VARIABLE, OPENAI_VARIABLE):
        if key := environment.get(variable, "").partition(",")[0].strip():
            return key
    return None


def _keys_in_file(path: Path, defaults: KeyLimits) -> list[ApiKey]:
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        # NOTE: a key that was given in the place of a file is not repeated.
        is_path = path.suffix == ".toml" or (len(path.parts) > 1 and path.parent.is_dir())
        name = path if is_path else "--api-key-file"
        raise KeyFileError(f"{name}: {error.strerror}") from error
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        # NOTE: leave out the parser's own message, which may quote a key.
        place = re.search(r"\(at .*\)", str(error))
        raise KeyFileError(f"{path}: not valid TOML {place[0] if place else ''}".strip()) from error
    if not tables:
        raise KeyFileError(f"{path}: it holds no key")
    try:
        return [_key(name, table, defaults) for name, table in tables.items()]
    except KeyFileError as error:
        raise KeyFileError(f"{path}: {error}") from None


def _key(name: str, table: object, defaults: KeyLimits) -> ApiKey:
    if not _NAME.fullmatch(name):
        raise KeyFileError("a key's name is made of letters, digits, '.', '_' and '-'")
    if not isinstance(table, Mapping):
        raise KeyFileError(f"{name}: must be a table: [{name}] and key = … below it")
    limit_names = [field.name for field in fields(KeyLimits)]
    for field in table:
        if field not in ("key", "sha256", *limit_names):
            raise KeyFileError(f"[{name}]: unknown field {field[:64]!r}")
    overrides: dict[str, int | None] = {}
    for field in limit_names:
        if field in table:
            value = table[field]
            if type(value) is not int or value < 0:
                raise KeyFileError(f"[{name}]: {field} must be a whole number, 0 or more")
            overrides[field] = value or None
    return ApiKey(name, _digest(name, table), replace(defaults, **overrides))


def _digest(name: str, table: Mapping[str, object]) -> bytes:
    key, sha256 = table.get("key"), table.get("sha256")
    if (key is None) == (sha256 is None):
        raise KeyFileError(f"[{name}]: needs either key or sha256")
    if sha256 is not None:
        if not isinstance(sha256, str) or not re.fullmatch(r"[0-9A-Fa-f]{64}", sha256):
            raise KeyFileError(f"[{name}]: sha256 must be 64 hexadecimal digits")
        return bytes.fromhex(sha256)
    if not isinstance(key, str) or len(key) < MIN_KEY_CHARS:
        raise KeyFileError(f"[{name}]: key must be a string of {MIN_KEY_CHARS} characters or more")
    return digest_of(key)
