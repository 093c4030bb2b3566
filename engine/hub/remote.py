"""Models of the Hugging Face hub, in the cache folder that all of the hub's tools share."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from chairlift.engine.errors import ModelError
from chairlift.engine.hub.resumable_download import fetch_large_files

# What mlx-lm reads: weights, configurations, tokenizer files, custom code, chat templates.
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


def download(model: str) -> Path:
    """The folder of a hub id's newest version, downloaded as far as it is not there.

    Without a network it is the version that is there. A connection that breaks is taken up again;
    of an earlier run, the files that came to their end are kept, and no others.

    Raises:
        ModelError: there is no such model, or it cannot be fetched.
    """
    # Imported late: half a second that a local model need not pay.
    from huggingface_hub import snapshot_download

    with _explained(model):
        return Path(snapshot_download(model, allow_patterns=_HUB_FILES))


def download_checked(model: str) -> Path:
    """The same, and each file is compared with the hub's checksum; damaged ones are fetched again.

    Of an earlier run, what had come of large files is kept, too.

    Raises:
        ModelError: as in ``download``; or a file stays wrong, or the hub cannot be asked.
    """
    with _explained(model):
        fetch_large_files(model, _HUB_FILES)
    path = download(model)
    damaged = _damaged(model, path)
    if damaged:
        print(f"damaged, fetched again: {', '.join(damaged)}", file=sys.stderr)
        for name in damaged:
            # What stands in the version's folder is a link to what holds the bytes.
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
    # What is missing was not asked for.
    return [mismatch["path"] for mismatch in found.mismatches]


@contextmanager
def _explained(model: str) -> Iterator[None]:
    from huggingface_hub.errors import (
        GatedRepoError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
    )

    try:
        yield
    except GatedRepoError as error:
        raise ModelError(
            f"{model}: access on the hub is restricted; accept its terms and run 'hf auth login'"
        ) from error
    except RepositoryNotFoundError as error:
        raise ModelError(f"{model}: no such file, directory, or model on the hub") from error
    except LocalEntryNotFoundError as error:
        raise ModelError(
            f"{model}: no such file or directory; the hub cannot be reached and holds no cached "
            "copy here"
        ) from error
    except Exception as error:
        # The hub's client lets errors of several HTTP libraries through.
        cause = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ModelError(f"{model}: cannot be fetched from the hub: {cause}") from error
