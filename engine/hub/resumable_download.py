"""Large files of the hub, downloaded so that the next run goes on where an earlier one was ended.

The hub's own client begins a file again in each run, but takes what it finds in its cache. So what
has come of a file stands there beside the whole ones, and becomes one of them once it is whole and
has its checksum.
"""

from __future__ import annotations

import os
import re
import sys
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

from chairlift.engine.hub.fetch import locked, sha256_of

# Less than that is sooner fetched again than asked for.
_LARGE_BYTES = 8 << 20
_SHA256 = re.compile(r"[0-9a-f]{64}")
_SUFFIX = ".incomplete"


@dataclass(frozen=True, slots=True)
class HubFile:
    """A file that the cache lacks, known by its SHA-256.

    ``size`` is in bytes; ``blobs`` is where whole files stand, and ``lock`` what the hub's client
    locks while it brings this one.
    """

    url: str
    sha256: str
    size: int
    blobs: Path
    lock: Path

    @property
    def whole(self) -> Path:
        return self.blobs / self.sha256

    @property
    def partial(self) -> Path:
        return self.blobs / (self.sha256 + _SUFFIX)


def fetch_large_files(model: str, patterns: list[str]) -> None:
    """Brings a hub model's large files into the hub's cache, each from where it was left.

    Raises:
        Exception: what the hub's client raises; OSError, if a file twice had a wrong checksum.
    """
    files = _lacking(model, patterns)
    for file in files:
        file.blobs.mkdir(parents=True, exist_ok=True)
        file.lock.parent.mkdir(parents=True, exist_ok=True)
        with locked(file.lock):
            if not file.whole.exists():
                _fetch(file)
    if files:
        _forget_others(files[0].blobs)


def _lacking(model: str, patterns: list[str]) -> list[HubFile]:
    # Imported late: half a second.
    from huggingface_hub import HfApi, constants, hf_hub_url
    from huggingface_hub.file_download import repo_folder_name

    cache = Path(constants.HF_HUB_CACHE)
    folder = repo_folder_name(repo_id=model, repo_type="model")
    blobs, locks = cache / folder / "blobs", cache / ".locks" / folder
    info = HfApi().model_info(model, files_metadata=True)
    lacking = []
    for file in info.siblings or []:
        if not any(fnmatch(file.rfilename, pattern) for pattern in patterns):
            continue
        # Without a SHA-256 it is kept in git, and small. The largest ones come by no plain HTTP.
        if file.lfs is None or (blobs / file.lfs.sha256).exists():
            continue
        if _LARGE_BYTES <= file.lfs.size <= constants.MAX_HTTP_DOWNLOAD_SIZE:
            # The version is named by its commit, so that it cannot change meanwhile.
            url = hf_hub_url(model, file.rfilename, revision=info.sha)
            lock = locks / f"{file.lfs.sha256}.lock"
            lacking.append(HubFile(url, file.lfs.sha256, file.lfs.size, blobs, lock))
    return lacking


def _fetch(file: HubFile) -> None:
    continued = file.partial.exists() and file.partial.stat().st_size <= file.size
    if not continued:
        file.partial.unlink(missing_ok=True)
    _download(file)
    if continued and sha256_of(file.partial) != file.sha256:
        print("what was left of an earlier run is damaged, fetched again", file=sys.stderr)
        file.partial.unlink()
        _download(file)
    if sha256_of(file.partial) != file.sha256:
        file.partial.unlink()
        raise OSError(f"{file.url} has another checksum than the hub says")
    os.replace(file.partial, file.whole)


def _download(file: HubFile) -> None:
    from huggingface_hub import get_token
    from huggingface_hub.file_download import http_get

    token = get_token()
    with file.partial.open("ab") as sink:
        http_get(
            file.url,
            sink,
            resume_size=sink.tell(),
            headers={"Authorization": f"Bearer {token}"} if token else {},
            expected_size=file.size,
        )


def _forget_others(blobs: Path) -> None:
    """Removes what had come of files that the model's newest version has no more."""
    for left in blobs.glob("*" + _SUFFIX):
        # NOTE: the hub's client has a random part in such names, and removes its own.
        if _SHA256.fullmatch(left.stem):
            left.unlink()
