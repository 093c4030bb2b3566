"""The commands ``fetch``, ``models`` and ``doctor``."""

from __future__ import annotations

import json
import os
import socket
import struct
import subprocess
import sys
from pathlib import Path

import pytest
from support.engine.fake_hub import COMMIT, Hub, serving
from support.engine.fetches import COMMAND, FILES, NAME, STEP, WEIGHTS, environment, run_chairlift

# Imported before a test replaces ``profile.current``: it would keep the replacement.
import chairlift.engine.device.memory  # noqa: F401
from chairlift.api.cli.main import main
from chairlift.engine.cpu.blas import BlasReport
from chairlift.engine.device.profile import CPU
from chairlift.engine.hub.inventory import stored_models
from chairlift.engine.process import diagnosis
from chairlift.engine.process.diagnosis import diagnose


@pytest.mark.slow
def test_a_hub_model_is_fetched_resumed_checked_repaired_and_listed(tmp_path: Path) -> None:
    with serving(Hub(NAME, FILES, breaks={"model.safetensors"})) as hub:
        here = environment(hub, tmp_path)
        done = run_chairlift("fetch", NAME, **here)
        assert done.returncode == 0, done.stderr
        path = Path(done.stdout.strip())
        assert path.name == COMMIT
        weights = path / "model.safetensors"
        assert weights.read_bytes() == WEIGHTS
        # The connection broke in the middle; the download was resumed there.
        assert hub.ranges == [f"bytes={STEP}-"]
        assert not (path / "README.md").exists()
        hub.downloads.clear()
        assert run_chairlift("fetch", NAME, **here).returncode == 0
        assert hub.downloads == []
        blob = weights.resolve()
        blob.chmod(0o644)
        blob.write_bytes(WEIGHTS[:-1] + b"!")
        repaired = run_chairlift("fetch", NAME, **here)
        assert repaired.returncode == 0, repaired.stderr
        assert "damaged, fetched again: model.safetensors" in repaired.stderr
        assert weights.read_bytes() == WEIGHTS
        assert hub.downloads == ["model.safetensors"]
        (listed,) = json.loads(run_chairlift("models", "--json", **here).stdout)
        assert (listed["name"], listed["architecture"]) == (NAME, "llama")
        assert listed["size"] == len(WEIGHTS) + len(FILES["config.json"])
        assert listed["path"] == str(path)
        hub.lies.add("model.safetensors")
        blob.unlink()
        weights.unlink()
        wrong = run_chairlift("fetch", NAME, **here)
        assert wrong.returncode == 1
        assert "has another checksum" in wrong.stderr.splitlines()[-1]
        assert not blob.exists()
        unknown = run_chairlift("fetch", "some-org/other", **here)
        assert unknown.returncode == 1
        assert "no such file, directory, or model" in unknown.stderr.splitlines()[-1]


@pytest.mark.slow
def test_a_gguf_file_of_a_repository_is_fetched_by_its_name(tmp_path: Path) -> None:
    # Readers of headers find no model in it, but the file is what the hub has.
    files = {"m.Q4_0.gguf": WEIGHTS, "sub/m.Q8_0.gguf": WEIGHTS[:100], "README.md": b"text"}
    with serving(Hub(NAME, files)) as hub:
        here = environment(hub, tmp_path)
        refused = run_chairlift("fetch", NAME, **here)
        assert refused.returncode == 1
        (line,) = [each for each in refused.stderr.splitlines() if "error:" in each]
        assert "has only GGUF files" in line
        assert f"{NAME}:m.Q4_0.gguf, {NAME}:sub/m.Q8_0.gguf" in line
        assert hub.downloads == []
        for name in ("m.Q4_0.gguf", "sub/m.Q8_0.gguf"):
            done = run_chairlift("fetch", f"{NAME}:{name}", **here)
            assert done.returncode == 0, done.stderr
            assert Path(done.stdout.strip()).read_bytes() == files[name]
            assert "Traceback" not in done.stderr
        assert sorted(hub.downloads) == ["m.Q4_0.gguf", "sub/m.Q8_0.gguf"]
        hub.downloads.clear()
        blob = Path(done.stdout.strip()).resolve()
        blob.chmod(0o644)
        blob.write_bytes(WEIGHTS[1:101])
        repaired = run_chairlift("fetch", f"{NAME}:sub/m.Q8_0.gguf", **here)
        assert "damaged, fetched again: sub/m.Q8_0.gguf" in repaired.stderr
        assert blob.read_bytes() == WEIGHTS[:100]
        unknown = run_chairlift("fetch", f"{NAME}:m.Q4_1.gguf", **here)
        assert unknown.returncode == 1
        assert f"no such file; the nearest: {NAME}:m.Q4_0.gguf" in unknown.stderr


@pytest.mark.slow
def test_a_gguf_file_is_fetched_by_its_quantization(tmp_path: Path) -> None:
    files = {f"sub/m-{tag}.gguf": tag.encode() for tag in ("Q4_K_M", "Q4_K_S", "IQ4_XS")}
    with serving(Hub(NAME, {**files, "mmproj-IQ4_XS.gguf": b"x"})) as hub:
        here = environment(hub, tmp_path)
        for tag in ("Q4_K_M", "iq4_xs"):
            done = run_chairlift("fetch", f"{NAME}:{tag}", **here)
            assert done.returncode == 0, done.stderr
            path = Path(done.stdout.strip())
            assert (path.name, path.read_bytes()) == (f"m-{tag.upper()}.gguf", tag.upper().encode())
        unknown = run_chairlift("fetch", f"{NAME}:Q4_K", **here)
        assert unknown.returncode == 1
        assert f"it has {NAME}:IQ4_XS, {NAME}:Q4_K_M, {NAME}:Q4_K_S" in unknown.stderr
    # Without a network, the files in the cache are found.
    again = run_chairlift("fetch", f"{NAME}:Q4_K_M", **here)
    assert "cannot be reached" in again.stderr or "cannot be fetched" in again.stderr
    command = (
        "from chairlift.engine.hub.source import resolve; import sys; "
        "print(resolve(sys.argv[1]).name)"
    )
    offline = {**os.environ, **here, "HF_HUB_OFFLINE": "1"}
    found = subprocess.run(
        [sys.executable, "-c", command, f"{NAME}:Q4_K_M"],
        capture_output=True,
        text=True,
        env=offline,
        timeout=180,
        check=True,
    )
    assert found.stdout.strip() == "m-Q4_K_M"


@pytest.mark.slow
def test_a_revision_is_fetched(tmp_path: Path) -> None:
    with serving(Hub(NAME, FILES)) as hub:
        done = run_chairlift("fetch", NAME, "--revision", "v2", **environment(hub, tmp_path))
        assert done.returncode == 0, done.stderr
        # Its checksums are those of its commit.
        assert {"v2"} <= hub.revisions <= {"v2", COMMIT}
    refused = run_chairlift("fetch", "--revision", "v2")
    assert "--revision needs a model of the hub" in refused.stderr


def gguf(architecture: str) -> bytes:
    """The header of a file without tensors."""

    def text(words: str) -> bytes:
        return struct.pack("<Q", len(words)) + words.encode()

    preamble = b"GGUF" + struct.pack("<IQQ", 3, 0, 1)
    return preamble + text("general.architecture") + struct.pack("<I", 8) + text(architecture)


def test_models_in_folders_are_listed_with_broken_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CHAIRLIFT_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "mine"
    (folder / "deep" / "er").mkdir(parents=True)
    (folder / "deep" / "er" / "small.gguf").write_bytes(gguf("qwen3"))
    (folder / "broken.gguf").write_bytes(gguf("qwen3")[:-3])
    (folder / "link.gguf").symlink_to(folder / "gone.gguf")
    for name, config in (("whole", b'{"model_type": "gemma3"}'), ("odd", b"[]"), ("no", b"{")):
        (folder / name).mkdir()
        (folder / name / "config.json").write_bytes(config)
        (folder / name / "model.safetensors").write_bytes(bytes(100))
    (folder / "deep" / "config.json").write_text("{}")
    found = {
        Path(model.name).relative_to(folder).as_posix(): (model.architecture, model.size)
        for model in stored_models([folder, folder / "deep"])
        if model.path.is_relative_to(folder)
    }
    assert found.pop("broken.gguf")[0].startswith("(truncated")
    reason, size = found.pop("link.gguf")
    assert ("No such file" in reason, size) == (True, 0)
    assert found == {
        "deep/er/small.gguf": ("qwen3", len(gguf("qwen3"))),
        "whole": ("gemma3", 124),
        "odd": ("(config.json cannot be read)", 102),
        "no": ("(config.json cannot be read)", 101),
    }
    assert main(["models", str(folder)]) == 0
    head, *rows = capsys.readouterr().out.splitlines()
    assert head.split() == ["NAME", "ARCHITECTURE", "SIZE", "WHERE"]
    assert any("gemma3" in row and "0.0 MB" in row and str(folder / "whole") in row for row in rows)
    with pytest.raises(SystemExit):
        main(["models", str(folder / "nothing")])
    assert "is not a directory" in capsys.readouterr().err


@pytest.mark.slow
def test_the_doctor_accepts_this_machine_and_reports_a_used_port() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        busy = run_chairlift("doctor", "--port", str(port))
    free = run_chairlift("doctor", "--port", str(port), "--json")
    assert (busy.returncode, free.returncode) == (1, 0)
    (line,) = [line for line in busy.stdout.splitlines() if line.startswith("NO")]
    assert line.split()[1:3] == ["port", f"127.0.0.1:{port}:"]
    assert busy.stdout.endswith("It cannot serve: see the lines marked NO.\n")
    report = json.loads(free.stdout)
    assert report["serves"] is True
    topics = [finding["topic"] for finding in report["findings"]]
    for topic in ("python", "chairlift", "mlx", "mlx-lm", "device", "kernels", "free memory"):
        assert topic in topics
    assert set(report["findings"][0]) == {"topic", "value", "advice", "serves"}


@pytest.mark.parametrize("host", ["no.such.host.invalid", "192.0.2.1", "a..b"])
def test_the_doctor_blames_no_server_for_a_wrong_address(host: str) -> None:
    (found,) = [finding for finding in diagnose(host, 0) if finding.topic == "port"]
    assert not found.serves
    assert "an address of this machine" in str(found.advice)


@pytest.mark.slow
def test_importing_mlx_lm_keeps_the_limit_of_open_files() -> None:
    limit = "resource.setrlimit(resource.RLIMIT_NOFILE, (900, 1000))"
    code = f"import os, resource, sys; {limit}; os.execv(sys.argv[1], sys.argv[1:])"
    done = subprocess.run(
        [sys.executable, "-c", code, *COMMAND, "doctor", "--json"],
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    findings = {found["topic"]: found for found in json.loads(done.stdout)["findings"]}
    assert findings["open files"]["value"] == "900"
    assert findings["kernels"]["serves"]


def test_the_doctor_reports_problems(monkeypatch: pytest.MonkeyPatch) -> None:
    def without_backend() -> str:
        raise ImportError("libmlx.so: cannot open\nshared object file")

    monkeypatch.setattr("chairlift.engine.device.profile.current", without_backend)
    findings = {finding.topic: finding for finding in diagnose("127.0.0.1", 0)}
    device = findings["device"]
    assert not device.serves
    assert device.value == "MLX does not work: libmlx.so: cannot open shared object file"
    assert "pip install --force-reinstall --no-deps mlx-" in str(device.advice)
    assert "kernels" not in findings
    assert not diagnosis._installed("no-such-package").serves
    assert diagnosis._huge_pages("always madvise [never]").advice is not None
    assert diagnosis._huge_pages("always [madvise] never").advice is None
    assert not diagnosis._memory(10).serves


def test_the_doctor_advises_against_a_slow_blas(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(diagnosis, "load_fast_blas", lambda: BlasReport(warning="None was found"))
    monkeypatch.setattr("chairlift.engine.device.profile.current", lambda: CPU)
    monkeypatch.setattr(diagnosis.platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(diagnosis.sys, "platform", "linux")
    findings = {finding.topic: finding for finding in diagnose("127.0.0.1", 0)}
    assert findings["BLAS"].value == "MLX's own"
    assert findings["BLAS"].serves
    assert str(findings["BLAS"].advice).startswith("None was found; MKL is a sixth faster")
