"""A real Prometheus server: Debian's, as ``make test`` unpacks it, or one that is installed."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

_UNPACKED = Path(sys.prefix) / "prometheus" / "usr" / "bin"
PATIENCE = 180.0
CONFIG = """
global: {{scrape_interval: 1s, evaluation_interval: 1s}}
rule_files: ['{rules}']
scrape_configs:
  - job_name: chairlift
    static_configs: [{{targets: ['{target}']}}]
"""


def tool(name: str) -> Path:
    """The path of ``prometheus`` or ``promtool``; skips the test if it is not installed."""
    found = shutil.which(name, path=str(_UNPACKED)) or shutil.which(name)
    if found is None:
        pytest.skip(f"no {name}: `make test` brings Debian's; elsewhere install Prometheus")
    return Path(found)


def promtool(*arguments: str | Path, text: str | None = None) -> subprocess.CompletedProcess[str]:
    """Runs ``promtool``; ``text`` is its standard input."""
    return subprocess.run(
        [tool("promtool"), *arguments],
        input=text,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )


@dataclass
class Prometheus:
    """A running server."""

    url: str

    def get(self, path: str, **query: str) -> Any:
        """The data of an API call, which has to succeed."""
        url = f"{self.url}/api/v1/{path}?{urllib.parse.urlencode(query)}"
        try:
            with urllib.request.urlopen(url, timeout=PATIENCE) as reply:
                answer = json.load(reply)
        except urllib.error.HTTPError as error:
            raise AssertionError(f"{query}: {error.read().decode()}") from None
        assert answer["status"] == "success"
        return answer["data"]

    def values(self, expression: str) -> list[float]:
        """The current values of all series of an expression."""
        return [
            float(series["value"][1]) for series in self.get("query", query=expression)["result"]
        ]

    def wait_for(self, expression: str) -> None:
        """Waits until an expression has a value."""
        deadline = time.monotonic() + PATIENCE
        while not self.values(expression):
            assert time.monotonic() < deadline, expression
            time.sleep(0.1)


@contextmanager
def scraping(folder: Path, port: int, target: str, rules: Path) -> Iterator[Prometheus]:
    """A server on the loopback that scrapes ``target`` (host:port) every second."""
    config = folder / "prometheus.yml"
    config.write_text(CONFIG.format(rules=rules.resolve(), target=target))
    log = folder / "prometheus.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [
                tool("prometheus"),
                f"--config.file={config}",
                f"--storage.tsdb.path={folder / 'data'}",
                f"--web.listen-address=127.0.0.1:{port}",
            ],
            stdout=output,
            stderr=output,
        )
        try:
            server = Prometheus(f"http://127.0.0.1:{port}")
            _wait_until_ready(server, process, log)
            yield server
        finally:
            process.terminate()
            process.wait(PATIENCE)


def _wait_until_ready(server: Prometheus, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + PATIENCE
    while True:
        assert process.poll() is None, log.read_text()
        assert time.monotonic() < deadline, log.read_text()
        try:
            with urllib.request.urlopen(f"{server.url}/-/ready", timeout=PATIENCE):
                return
        except urllib.error.URLError:
            time.sleep(0.05)
