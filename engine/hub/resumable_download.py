"""Downloads large files of the hub so that a later run continues where an earlier run was ended.

The hub's own client starts a file again in each run, but uses complete files in its cache. So an
incomplete file is kept in that cache, and renamed to the name that the client looks for once it is
complete and has the right checksum.
"""

from __future__ import annotations

import os
import re
import sys
from contextlib import suppress
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
    """A large file of a model of the hub.

    Attributes:
        name: its path in the repository.
        size: in bytes.
        blobs: the folder of the model's files, which are named by their SHA-256.
        locks: the folder of the files that the hub's client locks while it downloads one.
    """

    name: str
    url: str
    sha256: str
    size: int
    blobs: Path
    locks: Path

    @property
    def complete(self) -> Path:
        """The path of the complete file."""
        return self.blobs / self.sha256

    @property
    def partial(self) -> Path:
        """The path of the file while it is incomplete."""
        return self.blobs / (self.sha256 + _SUFFIX)

    @property
    def lock(self) -> Path:
        """The file that the hub's client locks while it downloads this one."""
        return self.locks / f"{self.sha256}.lock"


def fetch_large_files(model: str, patterns: list[str], revision: str | None = None) -> None:
    """Downloads a hub model's missing large files into the hub's cache, resuming begun ones.

    Raises:
        OSError: a file had a wrong checksum twice.
        Exception: whatever the hub's client raises.
    """
    files = _large_files(model, revision)
    for file in files:
        wanted = any(fnmatch(file.name, pattern) for pattern in patterns)
        if not wanted or file.complete.exists():
            continue
        file.blobs.mkdir(parents=True, exist_ok=True)
        file.locks.mkdir(parents=True, exist_ok=True)
        with locked(file.lock):
            if not file.complete.exists():
                _fetch(file)
    if files:
        _remove_stale(files)


def _large_files(model: str, revision: str | None) -> list[HubFile]:
    # Imported here because the import takes half a second.
    from huggingface_hub import HfApi, constants, hf_hub_url
    from huggingface_hub.file_download import repo_folder_name

    cache = Path(constants.HF_HUB_CACHE)
    folder = repo_folder_name(repo_id=model, repo_type="model")
    blobs, locks = cache / folder / "blobs", cache / ".locks" / folder
    info = HfApi().model_info(model, revision=revision, files_metadata=True)
    files = []
    for file in info.siblings or []:
        # A file without a SHA-256 is stored in git, and small. The very largest files are not
        # available by plain HTTP.
        if file.lfs and _LARGE_BYTES <= file.lfs.size <= constants.MAX_HTTP_DOWNLOAD_SIZE:
            # The revision is a commit, so that the file cannot change meanwhile.
            url = hf_hub_url(model, file.rfilename, revision=info.sha)
            name, sha256, size = file.rfilename, file.lfs.sha256, file.lfs.size
            files.append(HubFile(name, url, sha256, size, blobs, locks))
    return files


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


def _remove_stale(files: list[HubFile]) -> None:
    """Removes incomplete files that this version of the model does not have.

    A file that another process is downloading stays.
    """
    blobs, locks = files[0].blobs, files[0].locks
    known = {file.partial for file in files}
    locks.mkdir(parents=True, exist_ok=True)
    for left in set(blobs.glob("*" + _SUFFIX)) - known:
        # NOTE: the hub's client adds a random part to such names, and removes its files itself.
        if _SHA256.fullmatch(left.stem):
            with suppress(BlockingIOError), locked(locks / f"{left.stem}.lock", wait=False):
                left.unlink(missing_ok=True)
