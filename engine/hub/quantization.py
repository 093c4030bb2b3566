"""Finds a repository's GGUF file by its quantization, as in llama.cpp's and Ollama's names."""

from __future__ import annotations

import re
from pathlib import Path, PurePosixPath

from chairlift.engine.errors import ModelError
from chairlift.engine.hub.folder_check import choices, gguf_files
from chairlift.engine.hub.remote import explained

# The names of llama.cpp's types, as files have them: Q4_K_M, IQ3_XXS, BF16, MXFP4_MOE.
_TAG = re.compile(
    r"(?:^|[-._/])((?:I?Q|TQ|MXFP|NVFP)\d\w*|BF16|F16|FP16|F32|FP32)(?=[-./]|$)", re.I
)
# Files that accompany a model: the projector of images, and what a quantization was made with.
_OTHER_FILES = ("mmproj", "imatrix")


def quantized_file(model: str, tag: str, revision: str | None = None) -> str:
    """The name of the GGUF file of the hub id ``model`` whose quantization is ``tag``.

    The case of the tag does not matter. Without a network, the files in the cache are searched.

    Raises:
        ModelError: there is no such file, or there are several, or no such repository.
    """
    files = [
        name
        for name in gguf_files(_file_names(model, revision))
        if not PurePosixPath(name).name.lower().startswith(_OTHER_FILES)
    ]
    found = [name for name in files if _has_tag(name, tag)]
    if len(found) == 1:
        return found[0]
    if found:
        raise ModelError(
            f"{model}:{tag}: several files have this name; serve one of them: "
            f"{choices(f'{model}:', found)}"
        )
    if not files:
        raise ModelError(f"{model}:{tag}: the repository has no GGUF files")
    tags = sorted({match[1] for name in files for match in _TAG.finditer(_stem(name))})
    raise ModelError(
        f"{model}:{tag}: the repository has no GGUF file of that name; it has "
        f"{choices(f'{model}:', tags or files)}"
    )


def _stem(name: str) -> str:
    return name[: -len(".gguf")]


def _has_tag(name: str, tag: str) -> bool:
    """Whether ``tag`` is a part of a file's or a folder's name, between separators."""
    pattern = rf"(?:^|[-._/]){re.escape(tag)}(?=[-./]|$)"
    return re.search(pattern, _stem(name), re.IGNORECASE) is not None


def _file_names(model: str, revision: str | None) -> list[str]:
    # Imported here because the import takes half a second.
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub.errors import RepositoryNotFoundError, RevisionNotFoundError

    with explained(model):
        try:
            return list(HfApi().list_repo_files(model, revision=revision))
        except (RepositoryNotFoundError, RevisionNotFoundError):  # or a gated one
            raise
        except Exception:  # without a network
            # No file has this name, so an incomplete folder is found, too.
            cached = snapshot_download(
                model, revision=revision, local_files_only=True, allow_patterns=["/"]
            )
    return [path.relative_to(cached).as_posix() for path in Path(cached).rglob("*.gguf")]
