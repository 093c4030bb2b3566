"""API keys: the endpoints that need one, and the key file."""

from __future__ import annotations

import hashlib
from pathlib import Path

import openai
import pytest
from support.api.api_server import CHAT, engine_replying, running
from support.api.credentials import ALICE, BOB, alice_and_bob, bearer

from chairlift.api.admission.keys import (
    NO_LIMITS,
    ApiKey,
    KeyFileError,
    KeyLimits,
    digest_of,
    given_keys,
    read_keys,
)

PROMPT = {"prompt": "x"}


async def test_endpoints_that_need_a_key_and_those_that_do_not() -> None:
    async with running(engine_replying("Hello"), keys=alice_and_bob()) as server:
        for path in ("/health", "/ping", "/version", "/openapi.json", "/metrics"):
            async with server.http.get(server.url + path) as response:
                assert response.status == 200, path
        for method, path in (
            ("GET", "/v1/models"),
            ("GET", "/v1/models/org/tiny"),
            ("POST", "/v1/chat/completions"),
            ("POST", "/v1/completions"),
            ("POST", "/v1/embeddings"),
            ("POST", "/tokenize"),
            ("POST", "/detokenize"),
            ("GET", "/tokenizer_info"),
            ("GET", "/v1/completions"),
            ("GET", "/nothing"),
        ):
            async with server.http.request(method, server.url + path, json=CHAT) as response:
                assert response.status == 401, path
                assert response.headers["WWW-Authenticate"] == "Bearer"
                error = (await response.json())["error"]
                assert (error["code"], error["param"]) == ("invalid_api_key", None)
        rejected = server.metric("chairlift_requests_rejected_total", reason="unauthorized")
        assert rejected == 10
        assert not server.engine.submitted


async def test_keys_are_read_from_either_header() -> None:
    async with running(engine_replying("Hello"), keys=alice_and_bob()) as server:
        for headers in (bearer(ALICE), {"Authorization": f"bearer {BOB} "}, {"X-Api-Key": BOB}):
            status, _ = await server.post("/v1/completions", PROMPT, **headers)
            assert status == 200
        for headers in (bearer(ALICE + "x"), bearer(ALICE[:-1]), bearer(""), {"X-Api-Key": ""}):
            status, _ = await server.post("/v1/completions", PROMPT, **headers)
            assert status == 401
        with pytest.raises(openai.AuthenticationError):
            await server.openai.models.list()
        assert (await server.openai.with_options(api_key=ALICE).models.list()).data


def test_the_key_file(tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    sha256 = hashlib.sha256(BOB.encode()).hexdigest()
    path.write_text(f'[alice]\nkey = "{ALICE}"\nrpm = 5\ntpm = 0\n[bob]\nsha256 = "{sha256}"\n')
    limits = KeyLimits(rpm=60, tpm=100)
    read = read_keys(
        path, limits, given_keys(["from-a-flag", "and-another", "from-a-flag"], limits)
    )
    assert read == (
        ApiKey("alice", digest_of(ALICE), KeyLimits(rpm=5)),
        ApiKey("bob", digest_of(BOB), KeyLimits(60, 100)),
        ApiKey("default", digest_of("from-a-flag"), KeyLimits(60, 100)),
        ApiKey("default-2", digest_of("and-another"), KeyLimits(60, 100)),
    )
    assert ALICE not in repr(read)
    assert read_keys(None, NO_LIMITS) == ()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "holds no key"),
        (f"{ALICE}", "not valid TOML"),
        (f'alice = "{ALICE}"', "alice: must be a table"),
        ("[alice]", "needs either key or sha256"),
        (f'[alice]\nkey = "{ALICE}"\nsha256 = "00"', "needs either key or sha256"),
        ('[alice]\nkey = "short"', "8 characters or more"),
        ('[alice]\nsha256 = "xyz"', "64 hexadecimal digits"),
        (f'[alice]\nkey = "{ALICE}"\nrmp = 5', "unknown field 'rmp'"),
        (f'[alice]\nkey = "{ALICE}"\nrpm = -1', "rpm must be a whole number"),
        (f'["a b"]\nkey = "{ALICE}"', "a key's name"),
        (f'[alice]\nkey = "{ALICE}"\n[bob]\nkey = "{ALICE}"', "'alice' and 'bob' are the same"),
    ],
)
def test_errors_of_bad_key_files_do_not_contain_the_keys(
    tmp_path: Path, text: str, message: str
) -> None:
    path = tmp_path / "keys.toml"
    path.write_text(text)
    with pytest.raises(KeyFileError, match=message) as error:
        read_keys(path, NO_LIMITS)
    assert ALICE not in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", [ALICE, f"{ALICE}.x", f"{ALICE}/x+y="])
def test_a_key_in_the_place_of_the_file_is_not_repeated(name: str, tmp_path: Path) -> None:
    with pytest.raises(KeyFileError, match="--api-key-file: ") as error:
        read_keys(Path(name), NO_LIMITS)
    assert ALICE not in str(error.value)
    for path in (Path("keys-of-nobody.toml"), tmp_path / "none"):
        with pytest.raises(KeyFileError, match=path.name):
            read_keys(path, NO_LIMITS)


def test_given_keys_are_long_enough_and_counted_once() -> None:
    assert [key.name for key in given_keys([ALICE, BOB, ALICE], NO_LIMITS)] == [
        "default",
        "default-2",
    ]
    assert given_keys([], NO_LIMITS) == ()
    with pytest.raises(KeyFileError, match="fewer than 8 characters") as error:
        given_keys([ALICE, "tooshor"], NO_LIMITS)
    assert "tooshor" not in str(error.value)
