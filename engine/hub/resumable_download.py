"""Downloads large files of the hub so that a later run continues where an earlier run was ended.

The hub's own client starts a file again in each run, but uses complete files in its cache. So an
incomplete file is kept in that cache, and renamed to the name that the client looks for once it is
complete and has the right checksum.
"""

from __future__ import annotations

import os
import re
import sys
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

from chairlift.engine.hub.fetch import locked, sha256_of
from chairlift.engine.hub.progress import bar_class

# For smaller files, downloading again is faster than asking for the rest.
_LARGE_BYTES = 8 << 20
_SHA256 = re.compile(r"[0-9a-f]{64}")
_SUFFIX = ".incomplete"


@dataclass(frozen=True, slots=True)
class HubFile:
    """A file that is missing in the hub's cache.

    Attributes:
        size: in bytes.
        blobs: the folder of the model's files, which are named by their SHA-256.
        lock: the file that the hub's client locks while it downloads this one.
    """

    url: str
    sha256: str
    size: int
    blobs: Path
    lock: Path

    @property
    def complete(self) -> Path:
        """The path of the complete file."""
        return self.blobs / self.sha256

    @property
    def partial(self) -> Path:
        """The path of the file while it is incomplete."""
        return self.blobs / (self.sha256 + _SUFFIX)


def fetch_large_files(model: str, patterns: list[str], revision: str | None = None) -> None:
    """Downloads a hub model's missing large files into the hub's cache, resuming begun ones.

    Raises:
        OSError: a file had a wrong checksum twice.
        Exception: whatever the hub's client raises.
    """
    files = _missing(model, patterns, revision)
    for file in files:
        file.blobs.mkdir(parents=True, exist_ok=True)
        file.lock.parent.mkdir(parents=True, exist_ok=True)
        with locked(file.lock):
            if not file.complete.exists():
                _fetch(file)
    if files:
        _remove_stale(files[0].blobs)


def _missing(model: str, patterns: list[str], revision: str | None) -> list[HubFile]:
    # Imported here because the import takes half a second.
    from huggingface_hub import HfApi, constants, hf_hub_url
    from huggingface_hub.file_download import repo_folder_name

    cache = Path(constants.HF_HUB_CACHE)
    folder = repo_folder_name(repo_id=model, repo_type="model")
    blobs, locks = cache / folder / "blobs", cache / ".locks" / folder
    info = HfApi().model_info(model, revision=revision, files_metadata=True)
    missing = []
    for file in info.siblings or []:
        if not any(fnmatch(file.rfilename, pattern) for pattern in patterns):
            continue
        # A file without a SHA-256 is stored in git, and small. The very largest files are not
        # available by plain HTTP.
        if file.lfs is None or (blobs / file.lfs.sha256).exists():
            continue
        if _LARGE_BYTES <= file.lfs.size <= constants.MAX_HTTP_DOWNLOAD_SIZE:
            # The revision is a commit, so that the file cannot change meanwhile.
            url = hf_hub_url(model, file.rfilename, revision=info.sha)
            lock = locks / f"{file.lfs.sha256}.lock"
            missing.append(HubFile(url, file.lfs.sha256, file.lfs.size, blobs, lock))
    return missing


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
    os.replace(file.partial, file.complete)


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
            tqdm_class=bar_class(),
        )


def _remove_stale(blobs: Path) -> None:
    """Removes incomplete files that the model's newest version no longer has."""
    for left in blobs.glob("*" + _SUFFIX):
        # NOTE: the hub's client adds a random part to such names, and removes its files itself.
        if _SHA256.fullmatch(left.stem):
            left.unlink()
