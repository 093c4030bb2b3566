"""A real Ray of one machine, and ``chairlift cluster`` on it."""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from support.api.server_process import CHAIRLIFT, ended

from chairlift.loadtest.servers import procfs
from chairlift.loadtest.servers.ports import free_port

# Seconds that anything may take while other tests keep the machine busy.
PATIENCE = 240.0
_RAY = Path(sys.executable).parent / "ray"
_ENVIRONMENT = {
    # Ray's ports are open to other machines.
    "RAY_AUTH_MODE": "token",
    "RAY_AUTH_TOKEN": secrets.token_hex(32),
    # Ray would start a process for each CPU before any is needed.
    "RAY_enable_worker_prestart": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_SERVE_REPLICA_AUTOSCALING_METRIC_PUSH_INTERVAL_S": "1",
    "RAY_SERVE_HANDLE_AUTOSCALING_METRIC_PUSH_INTERVAL_S": "1",
}


@dataclass(frozen=True)
class RayCluster:
    """A Ray cluster of one machine.

    Attributes:
        process: ``ray start --block``, the parent of all of Ray's processes.
        address: where drivers connect to.
        url: where Serve's proxy will listen.
        log: the file with the output of ``ray start``.
    """

    process: subprocess.Popen[bytes]
    address: str
    url: str
    log: Path

    def chairlift(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Runs ``chairlift cluster`` on this cluster."""
        return subprocess.run(
            [CHAIRLIFT, "cluster", *arguments, "--address", self.address],
            env={**os.environ, **_ENVIRONMENT},
            capture_output=True,
            text=True,
            timeout=PATIENCE,
        )

    def deploy(self, config: Path) -> subprocess.CompletedProcess[str]:
        """Runs ``chairlift cluster deploy``."""
        return self.chairlift("deploy", str(config), "--port", self.url.rpartition(":")[2])

    def servers(self) -> list[int]:
        """The process ids of the replicas' servers that can serve."""
        return [pid for pid in procfs.tree(self.process.pid) if _serves(_arguments(pid))]


@contextmanager
def ray_cluster(folder: Path) -> Iterator[RayCluster]:
    """Starts Ray, and ends all of its processes at the end."""
    port, log = free_port(), folder / "ray.log"
    # Ray's local sockets need a short path.
    with tempfile.TemporaryDirectory(prefix="r", ignore_cleanup_errors=True) as temporary:
        ports = {
            "port": port,
            "ray-client-server-port": free_port(),
            "dashboard-agent-listen-port": free_port(),
        }
        with log.open("wb") as output:
            process = subprocess.Popen(
                [
                    *(_RAY, "start", "--head", "--block", "--include-dashboard=false"),
                    *("--num-cpus=4", "--node-ip-address=127.0.0.1"),
                    *(f"--temp-dir={temporary}", "--object-store-memory=100000000"),
                    *(f"--{name}={value}" for name, value in ports.items()),
                ],
                env={**os.environ, **_ENVIRONMENT},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        cluster = RayCluster(process, f"127.0.0.1:{port}", f"http://127.0.0.1:{free_port()}", log)
        try:
            until(lambda: "Ray runtime started" in log.read_text(), cluster)
            yield cluster
        finally:
            _end(process)


def until(condition: Callable[[], object], cluster: RayCluster) -> None:
    """Waits until ``condition`` holds, for PATIENCE seconds at most."""
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert cluster.process.poll() is None, cluster.log.read_text()
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.2)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ends Ray with SIGTERM, then all that it has left, which is much, with SIGKILL."""
    members = procfs.tree(process.pid)
    process.terminate()
    with suppress(subprocess.TimeoutExpired):
        process.wait(1)
    for pid in members:
        if not ended(pid):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    process.wait()


def _arguments(pid: int) -> list[str]:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().split("\0")
    except OSError:
        return []


def _serves(arguments: list[str]) -> bool:
    """Whether a process with these arguments is a replica's server, and healthy."""
    if "chairlift.api.cli.serve_child" not in arguments:
        return False
    port = arguments[arguments.index("--port") + 1]
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=PATIENCE):
            return True
    except OSError:
        return False
