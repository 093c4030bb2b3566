"""A model hub on localhost with one repository; it answers the requests that downloads make."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

COMMIT = "c" * 40


@dataclass
class Hub:
    """A repository and the faults of its server.

    Attributes:
        breaks: files whose first download ends in the middle.
        stalls: files whose first download stops in the middle and stays open.
        half_sent: set when a download stalls.
        lies: files whose bytes do not match their checksum.
        downloads: names of the files that were downloaded, in order.
        ranges: ``Range`` headers of the requests.
        revisions: the revisions that clients asked for.
    """

    name: str
    files: Mapping[str, bytes]
    commit: str = COMMIT
    breaks: set[str] = field(default_factory=set)
    stalls: set[str] = field(default_factory=set)
    half_sent: threading.Event = field(default_factory=threading.Event)
    lies: set[str] = field(default_factory=set)
    downloads: list[str] = field(default_factory=list)
    ranges: list[str] = field(default_factory=list)
    revisions: set[str] = field(default_factory=set)
    url: str = ""

    def tree(self) -> list[dict[str, object]]:
        listed = []
        for path, content in self.files.items():
            # Large files have a SHA-256, small ones git's hash of a blob.
            sha256 = hashlib.sha256(content).hexdigest()
            lfs = {"oid": sha256, "sha256": sha256, "size": len(content)}
            entry: dict[str, object] = {"type": "file", "path": path, "size": len(content)}
            entry["oid"] = hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
            if path.endswith((".safetensors", ".gguf")):
                entry["lfs"] = {**lfs, "pointerSize": 134}
            listed.append(entry)
        return listed


@contextmanager
def serving(hub: Hub) -> Iterator[Hub]:
    with ThreadingHTTPServer(
        ("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": hub})
    ) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        hub.url = f"http://127.0.0.1:{server.server_port}"
        yield hub
        server.shutdown()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    hub: Hub

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def log_message(self, *_: object) -> None:
        pass

    def _answer(self, with_body: bool) -> None:
        hub, path = self.hub, urlsplit(self.path).path
        if (
            path.startswith(f"/api/models/{hub.name}/revision/")
            or path == f"/api/models/{hub.name}"
        ):
            hub.revisions.update(path.split("/")[6:7])
            siblings = [entry | {"rfilename": entry["path"]} for entry in hub.tree()]
            self._send(
                json.dumps({"id": hub.name, "sha": hub.commit, "siblings": siblings}).encode()
            )
        elif path.startswith(f"/api/models/{hub.name}/tree/"):
            self._send(json.dumps(hub.tree()).encode())
        elif match := re.fullmatch(rf"/{hub.name}/resolve/[^/]+/(.+)", path):
            self._file(match[1], with_body)
        else:
            self.send_response(404)
            self.send_header("X-Error-Code", "RepoNotFound")
            self.send_header("Content-Length", "0")
            self.end_headers()

    def _send(self, body: bytes) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _file(self, name: str, with_body: bool) -> None:
        hub, content = self.hub, self.hub.files[name]
        start = 0
        if requested := self.headers.get("Range"):
            hub.ranges.append(requested)
            start = int(requested.removeprefix("bytes=").partition("-")[0])
        self.send_response(206 if start else 200)
        (entry,) = (entry for entry in hub.tree() if entry["path"] == name)
        lfs = entry.get("lfs")
        self.send_header("ETag", f'"{lfs["oid"] if isinstance(lfs, dict) else entry["oid"]}"')
        self.send_header("X-Repo-Commit", hub.commit)
        self.send_header("Content-Length", str(len(content) - start))
        if start:
            self.send_header("Content-Range", f"bytes {start}-{len(content) - 1}/{len(content)}")
        self.end_headers()
        if not with_body:
            return
        hub.downloads.append(name)
        if name in hub.lies:
            content = bytes(reversed(content))
        if name in hub.breaks:
            hub.breaks.remove(name)
            content = content[: len(content) // 2]
        if name in hub.stalls:
            hub.stalls.remove(name)
            self.wfile.write(content[: len(content) // 2])
            hub.half_sent.set()
            with suppress(ConnectionError):
                self.rfile.read()  # until the client is gone
            return
        self.wfile.write(content[start:])
        self.close_connection = True
