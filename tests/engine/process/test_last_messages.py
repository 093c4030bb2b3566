"""An engine's last messages arrive, although its process ends right after sending them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import zmq

# So large that sending takes longer than the end of a process.
MEGABYTES = 32
CHILD = f"""
import sys
from pathlib import Path
from chairlift.engine.process.engine_process import connected

with connected(Path(sys.argv[1])) as socket:
    socket.send(bytes({MEGABYTES} << 20))
    if sys.argv[2] == "error":
        raise SystemExit(1)
"""


@pytest.mark.slow
@pytest.mark.parametrize(("end", "code"), [("normal", 0), ("error", 1)])
def test_the_last_message_arrives(end: str, code: int, tmp_path: Path) -> None:
    context = zmq.Context()
    socket = context.socket(zmq.PAIR)
    try:
        path = tmp_path / "socket"
        socket.bind(f"ipc://{path}")
        done = subprocess.run([sys.executable, "-c", CHILD, str(path), end], check=False)
        assert done.returncode == code
        assert socket.poll(10_000), "the message is lost"
        assert len(socket.recv()) == MEGABYTES << 20
    finally:
        context.destroy(linger=0)
