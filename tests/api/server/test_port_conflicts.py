"""Real servers that ask for the same port."""

from __future__ import annotations

import os
import resource
import socket
import subprocess
from pathlib import Path

import pytest
from support.api.server_process import CHAIRLIFT, PATIENCE, ipv6, server_process, until

pytestmark = pytest.mark.system


@pytest.mark.parametrize("flag", ["--port", "--metrics-port"])
def test_a_used_port_is_an_error_before_anything_slow_begins(flag: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        done = subprocess.run(
            [CHAIRLIFT, "serve", "no/model", "--port", "0", flag, str(port)],
            capture_output=True,
            text=True,
            timeout=PATIENCE,
            check=False,
            env={**os.environ, "PYTHONPROFILEIMPORTTIME": "1"},
        )
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
    imported = [line.rpartition("|")[2].strip() for line in done.stderr.splitlines()]
    said = [line for line in done.stderr.splitlines() if not line.startswith("import time:")]
    assert done.returncode == 1
    assert said == [
        f"chairlift: error: cannot listen on 127.0.0.1:{port}: Address already in use by a server "
        "on this address, or on one that overlaps it"
    ]
    assert not {"mlx", "mlx.core", "mlx_lm", "transformers", "aiohttp", "zmq"} & {*imported}
    # CPU time, which the machine's other load does not change: 0.4 s on a machine of 2024.
    cpu_seconds = after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime
    assert cpu_seconds < 1.0


@ipv6
async def test_two_servers_on_one_port(tiny: Path, tmp_path: Path) -> None:
    """On different addresses both serve, and the second logs that the port is shared."""
    with server_process(tmp_path, tiny) as first:
        await first.healthy()
        port = int(first.url.rpartition(":")[2])
        with server_process(tmp_path, tiny, host="::1", port=port) as second:
            await second.healthy()
            assert "also in use by another server, on another address (IPv4)" in second.said
            assert "also in use" not in first.said


async def test_of_two_servers_that_start_together_one_serves(tiny: Path, tmp_path: Path) -> None:
    with server_process(tmp_path, tiny) as first:
        port = int(first.url.rpartition(":")[2])
        with server_process(tmp_path, tiny, port=port) as second:
            ends = {first.process: first, second.process: second}
            await until(lambda: any(process.poll() is not None for process in ends))
            (loser,) = (s for p, s in ends.items() if p.poll() is not None)
            (winner,) = (s for p, s in ends.items() if p.poll() is None)
            await winner.healthy()
            assert loser.process.returncode == 1
            assert f"error: cannot listen on 127.0.0.1:{port}: " in loser.said
            assert "loading" not in loser.said
