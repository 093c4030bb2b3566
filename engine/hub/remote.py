"""Downloads models of the Hugging Face hub into the cache folder that all hub tools share."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from chairlift.engine.errors import ModelError
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


def download(model: str, revision: str | None = None) -> Path:
    """Downloads the missing files of a hub id's version; returns the version's folder.

    ``revision`` is a branch, tag or commit; None means the newest version of the main branch.

    Without a network, it is the version in the cache. A broken connection is resumed. Files that an
    earlier run has completed are kept; files that it has begun are downloaded again.

    Raises:
        ModelError: there is no such model, or it cannot be fetched.
    """
    # Imported here because the import takes half a second, which a local model does not need.
    from huggingface_hub import snapshot_download

    with _explained(model):
        return Path(snapshot_download(model, revision=revision, allow_patterns=_HUB_FILES))


def download_checked(model: str) -> Path:
    """As ``download``, but verifies the hub's checksums and fetches damaged files again.

    Large files that an earlier run has begun are continued.

    Raises:
        ModelError: as in ``download``; or a file is wrong again, or the hub cannot be reached.
    """
    with _explained(model):
        fetch_large_files(model, _HUB_FILES)
    path = download(model)
    damaged = _damaged(model, path)
    if damaged:
        print(f"damaged, fetched again: {', '.join(damaged)}", file=sys.stderr)
        for name in damaged:
            # The version's folder contains links to the files with the bytes.
            (path / name).resolve().unlink()
            (path / name).unlink(missing_ok=True)
        path = download(model)
        if still := _damaged(model, path):
            raise ModelError(f"{model}: the hub's {still[0]} has another checksum than it says")
    return path


def _damaged(model: str, path: Path) -> list[str]:
    from huggingface_hub import HfApi

    with _explained(model):
        found = HfApi().verify_repo_checksums(model, revision=path.name)
    # Missing files are no mismatch: they do not match _HUB_FILES.
    return [mismatch["path"] for mismatch in found.mismatches]


@contextmanager
def _explained(model: str) -> Iterator[None]:
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
