"""The load test's data sets: drawn from a seed, and refused if the file is invalid."""

from __future__ import annotations

import ast
import json
import math
import re
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.fake_server import FakeServer, bench, serving

from chairlift.api.text.images.data_urls import data_url
from chairlift.engine.model.vision.decoding import decode
from chairlift.loadtest import cli
from chairlift.loadtest.bench.config import BenchConfig
from chairlift.loadtest.bench.dataset import Workload, build_workload
from chairlift.loadtest.data.workload import WorkloadRequest
from chairlift.loadtest.errors import UsageError
from chairlift.loadtest.servers.ports import free_port


async def by_words(text: str) -> int:
    return len(text.split())


async def workload(**flags: Any) -> Workload:
    return await build_workload(BenchConfig(**flags), by_words, lambda: None)


def words(count: int, word: str = "word") -> str:
    return " ".join([word] * count)


def conversation(*turns: str) -> dict[str, Any]:
    return {"id": "x", "conversations": [{"from": "human", "value": turn} for turn in turns]}


SHAREGPT = [
    conversation(words(5, "first"), words(7), words(900)),
    conversation(words(100, "second"), words(4)),
    conversation(words(1024, "third"), words(1024)),
    conversation(words(3, "short"), words(7)),
    conversation(words(10, "hasty"), words(3)),
    conversation(words(1025, "long"), words(7)),
    conversation(words(1000, "both"), words(1049)),
    conversation(words(10, "alone")),
    conversation(words(10, "silent"), ""),
    {"id": "empty"},
]

IMAGES: dict[str, Any] = {
    **{"dataset_name": "random-mm", "backend": "openai-chat", "endpoint": "/v1/chat/completions"},
    **{"random_mm_base_items_per_request": 2, "random_mm_num_mm_items_range_ratio": 0.5},
    "random_mm_bucket_config": "{(8, 16, 1): 1, (8, 8, 1): 2, (8, 8, 4): 0}",
}

TRACE = [
    {"arrival": 7.0, "prompt_tokens": 5, "output_tokens": 3},
    {"arrival": 7.5, "prompt_tokens": 9, "output_tokens": 4, "max_tokens": 8, "priority": -1},
    {"arrival": 9.0, "prompt_tokens": 2, "output_tokens": 1},
]
INFINITE = '{"arrival": 0, "output_tokens": 1, "prompt_tokens": 1e999}'


@pytest.fixture
def files(tmp_path: Path) -> Path:
    (tmp_path / "sharegpt.json").write_text(json.dumps(SHAREGPT))
    (tmp_path / "trace.jsonl").write_text("\n".join(map(json.dumps, TRACE)))
    (tmp_path / "custom.jsonl").write_text('{"prompt": "a b", "output_tokens": 5}\n')
    return tmp_path


async def test_a_line_of_prompts_may_have_any_character(tmp_path: Path) -> None:
    path, prompts = tmp_path / "custom.jsonl", ["a\u2028b\x85c", "d"]
    lines = [json.dumps({"prompt": prompt}, ensure_ascii=False) for prompt in prompts]
    path.write_text("\r\n".join(lines), encoding="utf-8", newline="")
    requests, _ = await workload(dataset_name="custom", dataset_path=str(path), num_prompts=2)
    assert [request.prompt for request in requests] == prompts


async def test_prefix_repetition_shares_its_prefixes_evenly() -> None:
    requests, offsets = await workload(
        dataset_name="prefix_repetition",
        num_prompts=10,
        prefix_repetition_prefix_len=20,
        prefix_repetition_suffix_len=6,
        prefix_repetition_num_prefixes=4,
        prefix_repetition_output_len=9,
    )
    assert [(request.prompt_len, request.output_len) for request in requests] == [(26, 9)] * 10
    heads = Counter(tuple(request.prompt.split()[:20]) for request in requests)
    assert sorted(heads.values()) == [2, 2, 3, 3]
    assert len({tuple(request.prompt.split()[20:]) for request in requests}) == 10
    # Shuffled: the prefixes do not alternate.
    assert [r.prompt.split()[0] for r in requests[:4]] != [
        r.prompt.split()[0] for r in requests[4:8]
    ]
    assert offsets == [0.0] * 10


async def test_each_document_is_to_come_back_with_a_function_renamed() -> None:
    requests, offsets = await workload(dataset_name="edit", num_prompts=6, edit_len=200)
    assert offsets == [0.0] * 6
    documents = []
    for request in requests:
        _, document, begun = request.prompt.split("```python\n")
        assert begun == ""  # the prompt also begins the reply
        document = document.partition("```")[0]
        module = ast.parse(document)
        functions = [node.name for node in module.body if isinstance(node, ast.FunctionDef)]
        assert len(functions) == len(module.body)
        renamed = re.search(r"the function (\w+) renamed to (\w+)\.", request.prompt)
        assert renamed is not None
        old, new = renamed.groups()
        assert old in functions
        assert new != old
        assert 160 <= len(document.split()) <= 240
        assert request.prompt_len == len(request.prompt.split())
        assert 200 < request.output_len < 220
        assert request.body == {}
        documents.append(document)
    assert len(set(documents)) == 6
    assert (await workload(dataset_name="edit", num_prompts=1, edit_len=1)).requests


async def test_conversations_may_have_the_document_as_their_prediction() -> None:
    chats: dict[str, Any] = {
        **{"dataset_name": "edit", "num_prompts": 2, "edit_len": 100},
        **{"backend": "openai-chat", "endpoint": "/v1/chat/completions"},
    }
    for request in (await workload(**chats)).requests:
        assert request.prompt.endswith("Change nothing else.\n")
    for request in (await workload(**chats, edit_prediction=True)).requests:
        prediction = request.body["prediction"]
        assert prediction["type"] == "content"
        assert f"```python\n{prediction['content']}```" in request.prompt


@pytest.mark.parametrize(
    "flags",
    [
        {"dataset_name": "edit", "edit_prediction": True},
        {"endpoint": "/v1/chat/completions", "edit_prediction": True},
        {"dataset_name": "edit", "edit_len": 0},
    ],
)
def test_settings_of_the_data_set_edit_that_cannot_work(flags: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="--edit-"):
        BenchConfig(**flags)


def images_of(request: WorkloadRequest) -> list[tuple[int, int]]:
    """The sizes of a request's images, which are behind its text."""
    [message] = request.body["messages"]
    text, *parts = message["content"]
    assert (message["role"], text) == ("user", {"type": "text", "text": request.prompt})
    urls = [part["image_url"]["url"] for part in parts]
    images = [decode(*data_url(url), "auto", "") for url in urls]
    return [image.size for image in images]


async def test_random_prompts_have_images_of_the_given_sizes() -> None:
    flags: dict[str, Any] = {"num_prompts": 60, "random_input_len": 5, "request_rate": 9.0}
    requests, offsets = await workload(**{**IMAGES, **flags})
    plain, same = await workload(**flags)
    assert (offsets, [each.prompt for each in requests]) == (same, [each.prompt for each in plain])
    sizes = [images_of(request) for request in requests]
    assert Counter(map(len, sizes)).keys() == {1, 2, 3}
    counts = Counter(size for each in sizes for size in each)
    # Height comes first in the flag, width in Pillow. A third of them is wide.
    assert counts.keys() == {(16, 8), (8, 8)}
    assert 0.2 < counts[16, 8] / counts.total() < 0.45
    urls = [
        part["image_url"]["url"] for r in requests for part in r.body["messages"][0]["content"][1:]
    ]
    assert len(set(urls)) == len(urls)
    limit = {"random_mm_limit_mm_per_prompt": '{"image": 2}'}
    requests, _ = await workload(**{**IMAGES, **flags, **limit})
    assert {len(images_of(request)) for request in requests} == {1, 2}
    none = {"random_mm_base_items_per_request": 0, "random_mm_bucket_config": '{"(8, 8, 1)": 1}'}
    requests, _ = await workload(**{**IMAGES, **flags, **none})
    assert {len(images_of(request)) for request in requests} == {0}


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        ({"endpoint": "/v1/completions"}, "--backend openai-chat"),
        ({"random_mm_base_items_per_request": -1}, "must not be negative"),
        ({"random_mm_num_mm_items_range_ratio": 1.1}, "between 0 and 1"),
        ({"random_mm_num_mm_items_range_ratio": math.nan}, "between 0 and 1"),
        ({"random_mm_base_items_per_request": 600}, "at most 255 images, but at least 300"),
        *(
            ({"random_mm_limit_mm_per_prompt": text}, "--random-mm-limit-mm-per-prompt must be")
            for text in ("", "3", "{", '{"video": 1}', '{"image": -1}', '{"image": 1.5}', "[" * 999)
        ),
        *(
            ({"random_mm_bucket_config": text}, "--random-mm-bucket-config must be")
            for text in (
                *("x", "{}", "{(8, 8, 1): 0}", "{(8, 8, 1): -1}", "{(8, 8): 1}", "{(0, 8, 1): 1}"),
                *("{(8, 8, 1): '1'}", "{(8.5, 8, 1): 1}", "{8: 1}", "{(8, 8, 1): 1e999}"),
            )
        ),
        ({"random_mm_bucket_config": "{(8, 8, 16): 1}"}, "videos are not supported"),
    ],
)
def test_settings_of_random_images_that_cannot_work(flags: dict[str, Any], complaint: str) -> None:
    with pytest.raises(UsageError, match=re.escape(complaint)):
        BenchConfig(**{**IMAGES, **flags})


async def test_without_pillow_random_images_name_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(UsageError, match=re.escape("pip install 'chairlift[vision]'")):
        await workload(**IMAGES, num_prompts=1)


async def test_sharegpt_takes_the_conversations_that_vllm_takes(files: Path) -> None:
    flags: dict[str, Any] = {
        "dataset_name": "sharegpt",
        "dataset_path": str(files / "sharegpt.json"),
        "num_prompts": 3,
    }
    requests, _ = await workload(**flags)
    lengths = {(r.prompt.split()[0], r.prompt_len, r.output_len) for r in requests}
    assert lengths == {("first", 5, 7), ("second", 100, 4), ("third", 1024, 1024)}
    # If there are too few, conversations repeat. With a fixed output length short answers
    # ("hasty") are taken, too; prompts of more than 1,024 tokens ("long") are not.
    requests, _ = await workload(**{**flags, "num_prompts": 30}, sharegpt_output_len=2)
    heads = {request.prompt.split()[0] for request in requests}
    assert heads == {"first", "second", "third", "hasty", "both", "silent"}
    assert len(requests) == 30
    assert {request.output_len for request in requests} == {2}


async def test_a_trace_is_replayed_at_its_times_with_its_lengths(files: Path) -> None:
    path = str(files / "trace.jsonl")
    requests, offsets = await workload(dataset_name="trace", dataset_path=path)
    assert offsets == [0.0, 0.5, 2.0]
    assert [(r.prompt_len, r.output_len) for r in requests] == [(5, 3), (9, 4), (2, 1)]
    assert [dict(r.body) for r in requests] == [{}, {"priority": -1}, {}]
    assert len((await workload(dataset_name="trace", dataset_path=path, num_prompts=2))[0]) == 2
    assert len((await workload(dataset_name="trace", dataset_path=path, duration=0.5))[0]) == 1


@pytest.mark.parametrize(
    "flags",
    [
        {"dataset_name": "random", "request_rate": 9.0, "random_range_ratio": 0.5},
        {**IMAGES, "request_rate": 9.0},
        {"dataset_name": "prefix_repetition", "max_concurrency": 3},
        {"dataset_name": "edit", "edit_len": 50},
        {"dataset_name": "sharegpt", "request_rate": 9.0},
        {"dataset_name": "trace"},
        {
            **{"dataset_name": "random", "ramp_up_strategy": "exponential"},
            **{"ramp_up_start_rps": 1.0, "ramp_up_end_rps": 9.0},
        },
    ],
    ids=lambda flags: flags["dataset_name"] + flags.get("ramp_up_strategy", ""),
)
async def test_the_same_flags_give_the_same_workload(files: Path, flags: dict[str, Any]) -> None:
    names = {"sharegpt": "sharegpt.json", "trace": "trace.jsonl"}
    if flags["dataset_name"] in names:
        flags = {**flags, "dataset_path": str(files / names[flags["dataset_name"]])}
    flags = {"num_prompts": 12, **flags}
    misbehaving = {"cancel_rate": 0.5, "slow_reader_rate": 0.25}
    once, again = [await workload(**flags, **misbehaving) for _ in "ab"]
    assert once == again
    other = await workload(**flags, **misbehaving, seed=1)
    assert other.requests != once.requests
    # Misbehaving clients change neither the requests nor their arrival times.
    well_behaved = await workload(**flags)
    assert well_behaved.offsets == once.offsets
    assert well_behaved.requests == [request.behaved for request in once.requests]


async def test_the_requested_share_of_clients_misbehaves() -> None:
    flags: dict[str, Any] = {"num_prompts": 40, "random_input_len": 4, "random_output_len": 9}
    requests, _ = await workload(**flags, cancel_rate=0.25, slow_reader_rate=0.1)
    cancelled = [request.cancel_after for request in requests if request.cancel_after is not None]
    assert len(cancelled) == 10
    assert all(1 <= after < 9 for after in cancelled)
    assert len(set(cancelled)) > 2
    assert [r.bytes_per_s for r in requests if r.bytes_per_s is not None] == [512.0] * 4
    # A reply of one token cannot be cancelled in the middle.
    requests, _ = await workload(**{**flags, "random_output_len": 1}, cancel_rate=1.0)
    assert all(request == replace(request, cancel_after=None) for request in requests)


def _writes(text: str) -> Callable[[Path], None]:
    return lambda path: path.write_text(text) and None


@pytest.mark.parametrize(
    ("name", "make", "complaint"),
    [
        ("sharegpt", lambda path: None, "No such file"),
        ("sharegpt", _writes("[{"), "is not a ShareGPT file"),
        ("sharegpt", _writes('{"conversations": []}'), "Expected `array`"),
        ("sharegpt", _writes('[{"conversations": [{"from": 1}]}]'), "$[0].conversations[0]"),
        ("sharegpt", _writes("[]"), "no conversation of two turns"),
        (
            "sharegpt",
            _writes(json.dumps(SHAREGPT[3:7])),
            "no conversation with a prompt of 4 to 1024",
        ),
        ("sharegpt", _writes('[{"id": ' + "[" * 100_000), "is not a ShareGPT file"),
        ("trace", lambda path: None, "No such file"),
        ("trace", _writes(""), "holds no requests"),
        ("trace", _writes('{"arrival": "soon"}\n'), "line 1: no output_tokens"),
        ("trace", _writes('{"arrival": ' + "[" * 100_000), "line 1: not JSON"),
        ("trace", _writes(INFINITE), "line 1: prompt_tokens must be a whole number"),
        ("trace", _writes("prompt,answer\n1,2\n"), "line 2: no column of arrivals"),
        ("custom", _writes('{"prompt": 5}\n'), ':1: no "prompt" text'),
        ("custom", _writes("[" * 100_000), ":1: not JSON"),
        ("custom", _writes("9" * 5000), ":1: not JSON"),
        ("custom", _writes('{"prompt": "\\ud800"}'), ':1: the "prompt" cannot be sent'),
    ],
)
def test_an_invalid_data_set_is_refused_in_one_line(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    name: str,
    make: Callable[[Path], None],
    complaint: str,
) -> None:
    make(tmp_path / "data")
    fake = FakeServer(base_url=f"http://127.0.0.1:{free_port()}")
    flags = ("--dataset-name", name, "--dataset-path", str(tmp_path / "data"), "--model", "m")
    assert bench(fake, *flags) == cli.EXIT_USAGE
    err = capsys.readouterr().err
    assert complaint in err
    assert err.count("\n") == 1


def test_bench_sends_a_trace_with_its_priorities_and_output_lengths(files: Path) -> None:
    with serving(FakeServer()) as fake:
        flags = ("--dataset-name", "trace", "--dataset-path", str(files / "trace.jsonl"))
        assert bench(fake, *flags, "--duration", "1", "--disable-tqdm") == cli.EXIT_OK
    assert [body["max_tokens"] for body in fake.bodies] == [3, 4]
    assert [body.get("priority") for body in fake.bodies] == [None, -1]
    assert all(body["ignore_eos"] for body in fake.bodies)
