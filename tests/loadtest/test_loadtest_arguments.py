"""Values with which nothing can be measured or saved: each is refused in one line, or mended."""

from __future__ import annotations

import argparse
import asyncio
import codecs
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.bench_run import bench_run
from support.fake_server import SMALL, FakeServer, bench, serving
from support.tiny import tiny_tokenizer

from chairlift.loadtest import cli, null, prefix, schemas, structured
from chairlift.loadtest.bench import files
from chairlift.loadtest.bench.config import BenchConfig
from chairlift.loadtest.bench.dataset import build_workload
from chairlift.loadtest.bench.files import check_writable, output_file, write_file
from chairlift.loadtest.bench.progress import Progress
from chairlift.loadtest.bench.report import result_block
from chairlift.loadtest.bench.result_file import result_json, save_result
from chairlift.loadtest.bench.tokenizer import local_counter
from chairlift.loadtest.data import random_images
from chairlift.loadtest.data.custom import custom_requests
from chairlift.loadtest.data.sharegpt import sharegpt_requests
from chairlift.loadtest.engine_bench.flags import engine_parser
from chairlift.loadtest.errors import UsageError


@pytest.mark.parametrize(
    "given", [("--rows", "1"), ("--tokens", "0"), ("--rounds", "0"), ("--rounds", "-1")]
)
def test_structured(given: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        structured.main(given)
    assert "--rows must be at least 2, and --tokens and --rounds 1" in capsys.readouterr().err


@pytest.mark.parametrize("given", [("--requests", "1"), ("--prefix-tokens", "0")])
def test_prefix(given: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        prefix.main(["none", *given])
    assert "--prefix-tokens must be at least 1, and --requests 2" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["", "run.json", "v1.5/run", "."])
def test_a_sweep_names_its_result_files(name: str, tmp_path: Path) -> None:
    flags = ("--sweep", "request-rate=100,200", "--save-result", "--result-dir", str(tmp_path))
    with serving(FakeServer()) as fake:
        assert bench(fake, *SMALL, *flags, "--result-filename", name) == cli.EXIT_OK
    found = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len(found) == 2
    assert all(json.loads(path.read_text())["completed"] == 6 for path in found)


@pytest.mark.parametrize("label", ["a/../../b", "/", "x" * 400, "ä" * 200, "a b"])
def test_any_label_names_a_file_in_the_folder(label: str, tmp_path: Path) -> None:
    run = bench_run(label=label, result_dir=str(tmp_path))
    path = save_result(run.config, result_json(run) | {"model_id": "m/" + "\x1b" * 300})
    assert path.resolve().parent == tmp_path
    assert json.loads(path.read_text())["label"] == label


def test_a_full_disk_ends_neither_a_sweep_nor_an_older_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "r.html"
    page.write_text("older")

    def fail(path: Path, data: bytes) -> int:
        with path.open("wb") as file:
            file.write(data[:10])
        raise OSError(28, "No space left on device")

    flags = ("--sweep", "max-concurrency=1,2", "--html", str(page), "--save-result")
    with serving(FakeServer()) as fake, monkeypatch.context() as patch:
        patch.setattr(files.Path, "write_bytes", fail)
        code = bench(fake, *SMALL, *flags, "--result-dir", str(tmp_path))
        assert len(fake.bodies) == 12
    printed = capsys.readouterr()
    assert code == cli.EXIT_FAILED
    assert printed.err.count("--html: [Errno 28] No space left on device") == 2
    assert printed.err.count("--save-result: [Errno 28] No space left on device") == 2
    assert "saved to" not in printed.out
    assert [path.name for path in tmp_path.iterdir()] == ["r.html"]
    assert page.read_text() == "older"


def test_a_file_is_checked_without_a_trace_and_written_through_links(tmp_path: Path) -> None:
    target, link = tmp_path / "target", tmp_path / "link"
    check_writable(tmp_path / "folder" / "new", "--out")
    assert list((tmp_path / "folder").iterdir()) == []
    target.write_text("older")
    link.symlink_to(target)
    check_writable(link, "--out")
    assert target.read_text() == "older"
    write_file(link, "\udcff newer", "--out")
    assert (link.is_symlink(), target.read_text()) == (True, "? newer")
    with pytest.raises(UsageError, match="--out: "):
        write_file(tmp_path, "text", "--out")
    assert output_file(str(target)) == target
    with pytest.raises(argparse.ArgumentTypeError, match="directory"):
        output_file(str(tmp_path))


def test_names_of_latencies_may_have_spaces(capsys: pytest.CaptureFixture[str]) -> None:
    with serving(FakeServer()) as fake:
        flags = ("--percentile-metrics", "ttft, e2el", "--metric-percentiles", "50, 99")
        assert bench(fake, *SMALL, *flags) == cli.EXIT_OK
    assert "P50 E2EL (ms):" in capsys.readouterr().out


def test_percentiles_keep_their_digits_as_in_vllm() -> None:
    run = bench_run()
    latency = run.metrics.latencies["ttft"]
    latency.percentiles.update({50.0: 1.0, 99.9: 2.0, 99.999999: 3.0, 100.0: 4.0})
    names = {name for name in result_json(run) if name.endswith("_ttft_ms")}
    assert {"p50_ttft_ms", "p99.9_ttft_ms", "p99.999999_ttft_ms", "p100_ttft_ms"} <= names
    assert "P99.999999 TTFT (ms):" in result_block(run.config, run.metrics)


@pytest.mark.parametrize("mark", [b"", codecs.BOM_UTF8])
async def test_files_of_prompts_may_begin_with_a_byte_order_mark(
    mark: bytes, tmp_path: Path
) -> None:
    path = tmp_path / "prompts"
    path.write_bytes(mark + b'{"prompt": "a b"}\r\n\r\n{"prompt": "c", "output_tokens": 2}\r\n')
    assert [(r.prompt, r.output_len) for r in custom_requests(path, 2, None)] == [
        ("a b", 256),
        ("c", 2),
    ]
    turns = [{"value": "a b c d e"}, {"value": "f g h i"}]
    path.write_bytes(mark + json.dumps([{"conversations": turns}]).encode())

    async def by_words(text: str) -> int:
        return len(text.split())

    made = await sharegpt_requests(path, 1, None, np.random.default_rng(0), by_words, lambda: None)
    assert [(r.prompt, r.output_len) for r in made] == [("a b c d e", 4)]


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        (b'{"prompt": "\xe9"}', "prompts is not UTF-8"),
        (b'{"prompt": "a", "output_tokens": true}', "whole number from 1 to 2147483647"),
        (b'{"prompt": "a", "output_tokens": 3000000000}', "whole number from 1 to 2147483647"),
    ],
)
def test_lines_that_cannot_be_sent_are_named(line: bytes, complaint: str, tmp_path: Path) -> None:
    path = tmp_path / "prompts"
    path.write_bytes(line)
    with pytest.raises(UsageError, match=complaint):
        custom_requests(path, 1, None)


async def _updates_during(progress: Progress, work: Any) -> int:
    """How often a display could have shown a number between the first and the last."""
    seen = set()

    async def watch() -> None:
        while True:
            seen.add(progress.done)
            await asyncio.sleep(0)

    watcher = asyncio.create_task(watch())
    await work
    watcher.cancel()
    return len(seen - {0, progress.total})


async def test_prompts_that_are_counted_here_show_progress(tmp_path: Path) -> None:
    tiny_tokenizer().save(str(tmp_path / "tokenizer.json"))
    config = BenchConfig(num_prompts=60, random_input_len=50)
    progress = Progress(60, "workload", shown=False)
    count = local_counter(str(tmp_path))
    assert await _updates_during(progress, build_workload(config, count, progress.add_done)) > 3
    assert progress.done == 60


async def test_images_show_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    def draw(size: object, rng: object) -> str:
        time.sleep(0.005)
        return "data:"

    monkeypatch.setattr(random_images, "image_url", draw)
    config = BenchConfig(dataset_name="random-mm", endpoint="/v1/chat/completions", num_prompts=10)
    progress = Progress(10, "workload", shown=False)

    async def count(text: str) -> None:
        return None

    assert await _updates_during(progress, build_workload(config, count, progress.add_done)) > 3
    assert progress.done == 10


def test_a_ramp_and_the_tokenizer_are_in_the_result(tmp_path: Path) -> None:
    ramp = {"ramp_up_strategy": "linear", "ramp_up_start_rps": 1.0, "ramp_up_end_rps": 2.5}
    run = bench_run(result_dir=str(tmp_path), tokenizer="org/tokens", **ramp)
    result = result_json(run)
    path = save_result(run.config, result)
    assert path.name.startswith("openai-ramp-up-linear-1qps-2.5qps-concurrency4-model-")
    assert result["tokenizer_id"] == "org/tokens"
    assert result_json(bench_run())["tokenizer_id"] == "org/model"


def test_only_the_prompts_that_are_sent_are_read(tmp_path: Path) -> None:
    path = tmp_path / "prompts"
    path.write_text('{"prompt": "a\\u2028b"}\n\n{"prompt": "c"}\nno JSON\n', encoding="utf-8")
    assert [request.prompt for request in custom_requests(path, 2, 5)] == ["a\u2028b", "c"]
    with pytest.raises(UsageError, match=":4: not JSON"):
        custom_requests(path, 3, 5)


@pytest.mark.parametrize(
    ("tool", "flag"), [(null, "--out"), (schemas, "--json"), (structured, "--json")]
)
def test_a_tool_checks_its_file_first(
    tool: Any, flag: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        tool.main([flag, "/dev/null/none"])
    assert f"argument {flag}: file: " in capsys.readouterr().err
    # The parser of the engine's benchmark also runs in processes of its own.
    parser = engine_parser("", ["shape"], ["float32"])
    with pytest.raises(SystemExit):
        parser.parse_args(["--out", "/dev/null/none"])
