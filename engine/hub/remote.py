"""Downloads models of the Hugging Face hub into the cache folder that all hub tools share."""

from __future__ import annotations

import difflib
import glob
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

from chairlift.engine.errors import ModelError, UnsupportedModel
from chairlift.engine.hub.folder_check import WEIGHTS, choices, gguf_files
from chairlift.engine.hub.progress import bar_class
from chairlift.engine.hub.resumable_download import fetch_large_files

# The files that mlx-lm reads: weights, configuration, tokenizer, custom code, chat templates.
_HUB_FILES = [
    "*.json",
    "model*.safetensors",
    "*.py",
    "tokenizer.model",
    "*.tiktoken",
    "*.txt",
    "*.jsonl",
    "*.jinja",
]


# A large repository has thousands of files; an error names the nearest few.
_NEAREST = 3


class Download(Protocol):
    """Downloads a model; ``file`` is one GGUF file of the repository instead of all it needs."""

    def __call__(
        self, model: str, file: str | None = None, revision: str | None = None
    ) -> Path: ...


def download(model: str, file: str | None = None, revision: str | None = None) -> Path:
    """Downloads the missing files of a hub id's version; returns the version's folder.

    Without a network, it is the version in the cache. A broken connection is resumed. Files that an
    earlier run has completed are kept; files that it has begun are downloaded again.

    Args:
        file: downloads only this GGUF file, and returns its path.
        revision: a branch, tag or commit; None means the newest version.

    Raises:
        ModelError: there is no such model or file, or it cannot be fetched.
        UnsupportedModel: the repository has only GGUF files, and ``file`` names none of them.
    """
    # Imported here because the import takes half a second, which a local model does not need.
    from huggingface_hub import snapshot_download

    with explained(model):
        folder = Path(
            snapshot_download(
                model, revision=revision, allow_patterns=_patterns(file), tqdm_class=bar_class()
            )
        )
    path = folder if file is None else folder / file
    if not (any(path.glob(WEIGHTS)) if file is None else path.is_file()):
        _explain_files(model, file, revision)
    return path


def download_checked(model: str, file: str | None = None, revision: str | None = None) -> Path:
    """As ``download``, but verifies the hub's checksums and fetches damaged files again.

    Large files that an earlier run has begun are continued.

    Raises:
        ModelError: as in ``download``; or a file is wrong again, or the hub cannot be reached.
        UnsupportedModel: as in ``download``.
    """
    with explained(model):
        fetch_large_files(model, _patterns(file), revision)
    path = download(model, file, revision)
    # The version's folder, which is named by its commit. It contains links to the files.
    folder = path if file is None else path.parents[len(Path(file).parts) - 1]
    damaged = _damaged(model, folder)
    if damaged:
        print(f"damaged, fetched again: {', '.join(damaged)}", file=sys.stderr)
        for name in damaged:
            (folder / name).resolve().unlink()
            (folder / name).unlink(missing_ok=True)
        path = download(model, file, revision)
        if still := _damaged(model, folder):
            raise ModelError(f"{model}: the hub's {still[0]} has another checksum than it says")
    return path


def _patterns(file: str | None) -> list[str]:
    """The files to download, as ``fnmatch`` patterns."""
    return _HUB_FILES if file is None else [glob.escape(file)]


def _damaged(model: str, path: Path) -> list[str]:
    from huggingface_hub import HfApi

    with explained(model):
        found = HfApi().verify_repo_checksums(model, revision=path.name)
    # Missing files are no mismatch: they do not match the patterns.
    return [mismatch["path"] for mismatch in found.mismatches]


def _explain_files(model: str, file: str | None, revision: str | None) -> None:
    """Raises an error that names the repository's GGUF files, if it can be served by them."""
    from huggingface_hub import HfApi

    try:
        names = HfApi().list_repo_files(model, revision=revision)
    except Exception:  # without a network, the directory's own check says what is missing
        names = []
    files = gguf_files(names)
    if file is not None:
        nearest = difflib.get_close_matches(file, files, _NEAREST, cutoff=0.0)
        known = f"; the nearest: {choices(f'{model}:', nearest)}" if nearest else ""
        raise ModelError(f"{model}:{file}: the repository has no such file{known}")
    if files:
        raise UnsupportedModel(
            f"{model}: the repository has only GGUF files; serve one of them: "
            f"{choices(f'{model}:', files)}"
        )


@contextmanager
def explained(model: str) -> Iterator[None]:
    """Turns the errors of the hub's client into a ModelError of one line."""
    from huggingface_hub.errors import (
        GatedRepoError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    try:
        yield
    except GatedRepoError as error:
        raise ModelError(
            f"{model}: access on the hub is restricted; accept its terms and run 'hf auth login'"
        ) from error
    except RepositoryNotFoundError as error:
        raise ModelError(f"{model}: no such file, directory, or model on the hub") from error
    except RevisionNotFoundError as error:
        raise ModelError(f"{model}: the hub has no such revision of it (--revision)") from error
    except LocalEntryNotFoundError as error:
        raise ModelError(
            f"{model}: no such file or directory; the hub cannot be reached and holds no cached "
            "copy here"
        ) from error
    except Exception as error:
        # The hub's client also raises the errors of several HTTP libraries.
        cause = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ModelError(f"{model}: cannot be fetched from the hub: {cause}") from error
