"""What a user gets wrong at the start is one line on stderr, without a traceback."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from codecs import BOM_UTF8
from collections.abc import Callable
from pathlib import Path

import mlx.core as mx
import pytest
from support.scripts import SERVER, run_scripts
from support.tiny import tiny_model_dir

pytestmark = pytest.mark.system
COMMAND = "import sys; from chairlift.api.cli.main import main; sys.exit(main())"
PATIENCE = 180.0
LFS_POINTER = (
    f"version https://git-lfs.github.com/spec/v1\noid sha256:{'4d7a2146' * 8}\nsize 269060552\n"
)


def _edit(path: Path, name: str, **changes: object) -> None:
    config = json.loads((path / name).read_text())
    (path / name).write_text(json.dumps({**config, **changes}))


def _remove_all(path: Path) -> None:
    for file in path.iterdir():
        file.unlink()


def _only_gguf(path: Path) -> None:
    _remove_all(path)
    (path / "tiny.Q4_0.gguf").write_bytes(b"GGUF")


def _split(path: Path) -> None:
    """Divides the weights into two files, of which only the first is there."""
    weights = mx.load(str(path / "model.safetensors"))
    assert isinstance(weights, dict)
    half = sorted(weights)[: len(weights) // 2]
    part = path / "model-00001-of-00002.safetensors"
    mx.save_safetensors(str(part), {name: weights[name] for name in half}, {"format": "mlx"})
    (path / "model.safetensors").unlink()


def _link(path: Path) -> None:
    (path / "model.safetensors").unlink()
    (path / "model.safetensors").symlink_to(path / "blob")


def _pipe(path: Path) -> None:
    (path / "config.json").unlink()
    os.mkfifo(path / "config.json")


CASES: dict[str, tuple[Callable[[Path], object], list[str]]] = {
    "empty": (_remove_all, ["the directory is empty", "a .gguf file, or a hub id"]),
    "GGUF": (_only_gguf, ["serve one of its files", "tiny.Q4_0.gguf"]),
    "type": (
        lambda path: _edit(path, "config.json", model_type="lama"),
        ["config.json", "'lama' is not supported", "llama"],
    ),
    "weights": (
        lambda path: (path / "model.safetensors").rename(path / "pytorch_model.bin"),
        ["PyTorch weights", "mlx_lm convert"],
    ),
    "tokenizer": (
        lambda path: (path / "tokenizer.json").write_text("[1, 2"),
        ["tokenizer.json: damaged"],
    ),
    "part": (_split, ["weights are missing: model-00002-of-00002.safetensors; fetch them again"]),
    "link": (_link, ["model.safetensors: a link to a file that does not exist"]),
    "pipe": (_pipe, ["config.json: a pipe, socket or device instead of a file"]),
    "pointer": (
        lambda path: (path / "model.safetensors").write_text(LFS_POINTER),
        ["model.safetensors: this is Git LFS's pointer", "git lfs pull"],
    ),
    "pointer of the tokenizer": (
        lambda path: (path / "tokenizer.json").write_text(LFS_POINTER),
        ["tokenizer.json: this is Git LFS's pointer", "git lfs pull"],
    ),
    "byte order mark": (
        lambda path: (path / "config.json").write_bytes(
            BOM_UTF8 + (path / "config.json").read_bytes()
        ),
        ["config.json: damaged, this is not JSON: Unexpected UTF-8 BOM"],
    ),
    "generation config": (
        lambda path: (path / "generation_config.json").write_text("[1]"),
        ["generation_config.json: damaged, this is not a JSON object"],
    ),
    "no tokenizer": (lambda path: (path / "tokenizer.json").unlink(), ["it has no tokenizer"]),
}


@pytest.fixture(scope="module")
def runs(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, tuple[Path, subprocess.CompletedProcess[str]]]:
    """What the server says of each folder of the selected cases."""
    paths, scripts = dict[str, Path](), dict[str, Path]()
    for item in request.session.items:
        if isinstance(item, pytest.Function) and item.function is test_a_damaged_folder_is_one_line:
            case, folder = item.callspec.params["case"], tmp_path_factory.mktemp("damaged")
            path = paths[case] = tiny_model_dir(folder, "llama")
            damage, _ = CASES[case]
            damage(path)
            command = ["chairlift", "serve", str(path), "--port=0", "--log-level=warning"]
            scripts[case] = folder / "serve.py"
            scripts[case].write_text(f"import sys\nsys.argv = {command}\n{COMMAND}\n")
    done = run_scripts(list(scripts.values()), 2, SERVER)
    return {case: (paths[case], done[script]) for case, script in scripts.items()}


@pytest.mark.parametrize("case", CASES)
def test_a_damaged_folder_is_one_line(
    case: str, runs: dict[str, tuple[Path, subprocess.CompletedProcess[str]]]
) -> None:
    _, said = CASES[case]
    path, done = runs[case]
    assert done.returncode == 1, done.stderr
    errors = [line for line in done.stderr.splitlines() if " WARNING " not in line]
    assert len(errors) == 1, done.stderr
    assert errors[0].startswith(f"chairlift: error: {path}")
    for words in said:
        assert words in errors[0]


def test_a_folder_whose_name_is_not_utf_8_is_one_line(tmp_path: Path) -> None:
    path = os.fsencode(tiny_model_dir(tmp_path, "llama").rename(tmp_path / "b\udce4r"))
    done = subprocess.run(
        [sys.executable, "-c", COMMAND, "serve", path, "--port=0", "--log-level=warning"],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert done.returncode == 1, done.stderr
    (line,) = done.stderr.splitlines()
    assert line == f"chairlift: error: '{tmp_path}/b\\udce4r': this name is not UTF-8; rename it"


@pytest.mark.parametrize("arguments", [["--help"], ["serve", "--help"], ["models"]])
def test_a_closed_pipe_ends_a_command_quietly(arguments: list[str], tmp_path: Path) -> None:
    # The reader has left before the command writes.
    reader, writer = os.pipe()
    os.close(reader)
    try:
        done = subprocess.run(
            [sys.executable, "-c", COMMAND, *arguments],
            stdout=writer,
            stderr=subprocess.PIPE,
            text=True,
            timeout=PATIENCE,
            check=False,
        )
    finally:
        os.close(writer)
    assert done.stderr == ""
    # argparse itself ignores that a long help cannot be written.
    assert done.returncode == -signal.SIGPIPE or (done.returncode == 0 and "--help" in arguments)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="Linux's device without space")
@pytest.mark.parametrize("arguments", [["models"], ["completion", "bash"]])
def test_a_full_disk_below_standard_output_is_one_line(arguments: list[str]) -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-c", COMMAND, *arguments],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=PATIENCE,
            check=False,
        )
    assert done.stderr == "chairlift: error: standard output: No space left on device\n"
    assert done.returncode == 1
