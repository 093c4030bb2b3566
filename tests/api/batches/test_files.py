"""/v1/files with OpenAI's client: upload, list, content, delete, and every limit."""

from __future__ import annotations

import asyncio
import errno
import io
import os
import sqlite3
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import openai
import pytest
from support.api.api_server import Running, engine_replying, running, until

from chairlift.api.errors import StorageUnavailable
from chairlift.api.openai.batches.file_table import FileTable
from chairlift.api.openai.batches.folder import default_folder
from chairlift.api.openai.batches.replies import FileObject


@pytest.fixture
async def server() -> AsyncIterator[Running]:
    async with running(engine_replying("Hello")) as server:
        yield server


async def upload(server: Running, content: bytes, name: str = "in.jsonl", **more: Any) -> str:
    file = await server.openai.files.create(file=(name, content), purpose="batch", **more)
    return file.id


async def test_a_file_is_kept_as_it_is(server: Running) -> None:
    content = os.urandom(3_000_000)
    file = await server.openai.files.create(file=("a b.jsonl", content), purpose="batch")
    assert (file.bytes, file.filename, file.purpose) == (len(content), "a b.jsonl", "batch")
    assert file.expires_at == file.created_at + 30 * 86400
    assert await server.openai.files.retrieve(file.id) == file
    assert (await server.openai.files.content(file.id)).content == content
    assert (await server.openai.files.delete(file.id)).deleted
    for call in (server.openai.files.retrieve, server.openai.files.content):
        with pytest.raises(openai.NotFoundError, match="No such File object"):
            await call(file.id)
    assert list((server.service.settings.file_dir or Path()).glob("*/*")) == []


@pytest.mark.parametrize(
    "name",
    ["../../etc/passwd", "/etc/passwd", "a\x00b", "ü/\u2028.jsonl", "x" * 5000, ".", "C:\\a"],
)
async def test_a_name_is_no_path(server: Running, name: str) -> None:
    file_id = await upload(server, b"content", name)
    folder = server.service.settings.file_dir
    assert folder is not None
    assert {path.name for path in (folder / "contents").iterdir()} == {file_id}
    assert (await server.openai.files.content(file_id)).content == b"content"
    assert len((await server.openai.files.retrieve(file_id)).filename) <= 255


@pytest.mark.parametrize("file_id", ["none", "..%2F..%2Flock", "%00", "%ff", "x" * 3000])
async def test_an_unknown_file(server: Running, file_id: str) -> None:
    assert (await server.get(f"/v1/files/{file_id}"))[0] == 404
    assert (await server.get(f"/v1/files/{file_id}/content"))[0] == 404


async def test_pages_of_files(server: Running) -> None:
    made = [await upload(server, b"x") for _ in range(5)]
    assert [file.id async for file in server.openai.files.list()] == made[::-1]
    assert [file.id async for file in server.openai.files.list(limit=2, order="asc")] == made
    page = await server.openai.files.list(limit=2, after=made[2], order="asc")
    assert ([file.id for file in page.data], page.has_more) == (made[3:], False)
    assert (await server.openai.files.list(purpose="batch_output")).data == []
    assert len((await server.openai.files.list(purpose="batch")).data) == 5
    for query in ("limit=0", "limit=10001", "after=none", "order=up", "purpose=vision"):
        assert (await server.get(f"/v1/files?{query}"))[0] == 400


async def test_a_file_expires(server: Running) -> None:
    expiry: Any = {"anchor": "created_at", "seconds": 3600}
    file_id = await upload(server, b"x", expires_after=expiry)
    other = await upload(server, b"x")
    file = await server.openai.files.retrieve(file_id)
    assert file.expires_at == file.created_at + 3600
    now = file.created_at + 3601
    assert await server.storage.run(lambda tables: tables.files.delete_expired(now)) == 1
    assert [file.id async for file in server.openai.files.list()] == [other]


async def post_form(server: Running, fields: dict[str, Any]) -> tuple[int, Any]:
    form = aiohttp.FormData(default_to_multipart=True)
    for name, value in fields.items():
        if isinstance(value, bytes):
            form.add_field(name, value, filename="f")
        else:
            form.add_field(name, value)
    async with server.http.post(f"{server.url}/v1/files", data=form) as response:
        return response.status, await response.json()


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"file": b"x"}, "purpose: is missing"),
        ({"purpose": "batch"}, "file: is missing"),
        ({"file": b"x", "purpose": "vision"}, "only batch is supported"),
        ({"file": b"x", "purpose": "batch", "other": "x"}, "unknown field 'other'"),
        ({"file": b"x", "purpose": "b" * 2000}, "may have 1024 bytes"),
        ({"file": b"x", "purpose": "batch", "expires_after[seconds]": "5"}, "whole number"),
        ({"file": b"x", "purpose": "batch", "expires_after[anchor]": "now"}, "created_at"),
    ],
)
async def test_wrong_uploads_leave_nothing(
    server: Running, fields: dict[str, Any], said: str
) -> None:
    status, reply = await post_form(server, fields)
    assert status == 400
    assert said in reply["error"]["message"]
    assert (await server.openai.files.list()).data == []
    folder = server.service.settings.file_dir
    assert folder is not None
    assert list(folder.glob("*/*")) == []


async def test_a_file_may_precede_its_purpose(server: Running) -> None:
    assert (await post_form(server, {"file": b"x", "purpose": "batch"}))[0] == 200
    assert (await post_form(server, {"purpose": "batch", "file": b"x"}))[0] == 200


@pytest.mark.parametrize(
    ("content_type", "body"),
    [
        ("application/json", b"{}"),
        ("multipart/form-data", b"x"),
        ("multipart/form-data; boundary=b", b"nothing"),
        ("multipart/form-data; boundary=b", b'--b\r\nContent-Disposition: form-data; name="file"'),
        ("multipart/form-data; boundary=b", b"--b\r\n\r\nx\r\n--b--\r\n"),
    ],
)
async def test_bodies_that_are_no_form(server: Running, content_type: str, body: bytes) -> None:
    headers = {"Content-Type": content_type}
    async with server.http.post(f"{server.url}/v1/files", data=body, headers=headers) as response:
        assert response.status == 400, await response.text()
    assert (await server.openai.files.list()).data == []


async def test_limits() -> None:
    limits = {"max_file_bytes": 1000, "max_files": 3, "file_dir_bytes": 2500}
    async with running(engine_replying("a"), **limits) as server:
        for size in (1001, 5_000_000):
            with pytest.raises(openai.APIStatusError, match="1000 bytes") as refused:
                await upload(server, b"x" * size)
            assert refused.value.status_code == 413
        first = await upload(server, b"x" * 1000)
        await upload(server, b"x" * 1000)
        with pytest.raises(openai.BadRequestError, match="2500 bytes"):
            await upload(server, b"x" * 501)
        await upload(server, b"x")
        with pytest.raises(openai.BadRequestError, match="3 files"):
            await upload(server, b"x")
        await server.openai.files.delete(first)
        await upload(server, b"x" * 500)


async def test_files_can_be_turned_off() -> None:
    async with running(engine_replying("a"), file_dir_bytes=0) as server:
        for path in ("/v1/files", "/v1/batches"):
            status, reply = await server.get(path)
            assert (status, "not supported" in reply["error"]["message"]) == (400, True)


async def test_an_upload_that_ends_early_leaves_nothing(server: Running) -> None:
    head = (
        b"POST /v1/files HTTP/1.1\r\nHost: x\r\nContent-Length: 9999999\r\n"
        b"Content-Type: multipart/form-data; boundary=b\r\n\r\n"
        b'--b\r\nContent-Disposition: form-data; name="file"; filename="f"\r\n\r\n'
    )
    host, port = server.url.removeprefix("http://").split(":")
    _, writer = await asyncio.open_connection(host, int(port))
    writer.write(head + b"x" * 2_000_000)
    await writer.drain()
    incoming = (server.service.settings.file_dir or Path()) / "incoming"
    await until(lambda: incoming.exists() and list(incoming.iterdir()))
    writer.close()
    await until(lambda: not (list(incoming.iterdir()) or server.storage.uploads))


async def test_an_upload_that_cannot_be_recorded_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a full disk its content would count against no limit until the next start."""

    def full(table: FileTable, owner: str, file: FileObject) -> None:
        raise sqlite3.OperationalError("database or disk is full")

    monkeypatch.setattr(FileTable, "insert", full)
    async with running(engine_replying("Hello"), file_dir=tmp_path) as server:
        with pytest.raises(openai.InternalServerError, match="disk is full"):
            await server.openai.files.create(file=("a.jsonl", b"{}"), purpose="batch")
        assert list((tmp_path / "contents").iterdir()) == []
        assert list((tmp_path / "incoming").iterdir()) == []


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is full")
@pytest.mark.parametrize("size", [2, 3_000_000])
async def test_an_upload_to_a_full_disk_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    def opened(path: Path, mode: str) -> io.BufferedWriter:
        return io.BufferedWriter(io.FileIO("/dev/full", "w"))

    async with running(engine_replying("Hello"), file_dir=tmp_path) as server:
        monkeypatch.setattr(Path, "open", opened)
        with pytest.raises(openai.InternalServerError, match="No space left on device") as caught:
            await upload(server, b"x" * size)
        assert (caught.value.status_code, caught.value.code) == (503, "storage_unavailable")
        assert server.storage.uploads == 0


async def test_a_folder_on_a_full_disk_can_be_opened_once_there_is_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(descriptor: int, content: bytes, offset: int) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    async with running(engine_replying("Hello"), file_dir=tmp_path) as server:
        with monkeypatch.context() as patch:
            patch.setattr(os, "pwrite", full)
            status, reply = await server.get("/v1/files")
            assert (status, reply["error"]["code"]) == (503, "storage_unavailable")
        assert (await server.openai.files.list()).data == []


async def test_two_servers_cannot_share_a_folder(tmp_path: Path) -> None:
    async with running(engine_replying("a"), file_dir=tmp_path) as first:
        await upload(first, b"x")
        async with running(engine_replying("b"), file_dir=tmp_path) as second:
            status, reply = await second.get("/v1/files")
            assert status == 503
            assert f"in use by another server (process {os.getpid()})" in reply["error"]["message"]
            with pytest.raises(StorageUnavailable):
                await second.storage.open()
    async with running(engine_replying("c"), file_dir=tmp_path) as third:
        assert len((await third.openai.files.list()).data) == 1


@pytest.mark.parametrize("damage", ["database", "version", "file"])
async def test_a_folder_that_cannot_be_used_is_an_error(tmp_path: Path, damage: str) -> None:
    folder = tmp_path / "files"
    if damage == "file":
        folder.write_text("x")
    else:
        async with running(engine_replying("a"), file_dir=folder) as server:
            await upload(server, b"x")
            if damage == "version":
                await server.storage.run(
                    lambda tables: tables.folder.database.execute("PRAGMA user_version = 99")
                )
        if damage == "database":
            (folder / "files.sqlite3").write_bytes(b"no database" * 1000)
    async with running(engine_replying("a"), file_dir=folder) as server:
        status, reply = await server.get("/v1/files")
        assert (status, str(folder) in reply["error"]["message"]) == (503, True)
        assert reply["error"]["code"] == "storage_unavailable"


def test_the_default_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CHAIRLIFT_CACHE", str(tmp_path))
    assert default_folder() == tmp_path / "files"
    monkeypatch.delenv("CHAIRLIFT_CACHE")
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    assert default_folder() == tmp_path / "chairlift" / "files"


async def test_a_user_without_a_home_needs_the_flag(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("CHAIRLIFT_CACHE", raising=False)
    monkeypatch.delenv("XDG_DATA_HOME", raising=False)
    monkeypatch.setattr(Path, "home", no_home)
    async with running(engine_replying("a"), file_dir=None) as server:
        assert not await server.storage.exists()
        status, reply = await server.get("/v1/files")
        assert (status, "--file-dir" in reply["error"]["message"]) == (503, True)
