"""A repository's GGUF file is found by its quantization, however its files are named."""

from __future__ import annotations

import pytest

from chairlift.engine.errors import ModelError
from chairlift.engine.hub import quantization
from chairlift.engine.hub.quantization import quantized_file

MODEL = "org/name"


def found(tag: str, *files: str) -> str:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(quantization, "_file_names", lambda model, revision: list(files))
        return quantized_file(MODEL, tag)


@pytest.mark.parametrize(
    "name",
    [
        "Model-1.5B-Instruct-Q4_K_M.gguf",
        "model.Q4_K_M.gguf",
        "model-q4_k_m.GGUF",
        "Q4_K_M/model.gguf",
        "model-Q4_K_M-imat.gguf",
        "Q4_K_M.gguf",
    ],
)
def test_usual_names(name: str) -> None:
    others = ["m-Q4_K_S.gguf", "m-IQ4_K_M.gguf", "m-Q4_K_M_L.gguf", "mmproj-Q4_K_M.gguf", "x.txt"]
    for tag in ("Q4_K_M", "q4_k_m"):
        assert found(tag, *others, name) == name


def test_an_unknown_quantization_lists_those_present() -> None:
    with pytest.raises(ModelError) as caught:
        found("Q5_0", "m-Q4_0.gguf", "m.bf16.gguf", "MXFP4/m-MXFP4.gguf", "README.md")
    assert str(caught.value) == (
        f"{MODEL}:Q5_0: the repository has no GGUF file of that name; it has {MODEL}:MXFP4, "
        f"{MODEL}:Q4_0, {MODEL}:bf16"
    )
    with pytest.raises(ModelError, match=r"no GGUF file of that name; it has org/name:a\.gguf"):
        found("Q5_0", "a.gguf")
    with pytest.raises(ModelError, match="has no GGUF files"):
        found("Q5_0", "model.safetensors")


def test_several_files_of_a_quantization_are_listed() -> None:
    parts = ["Q8_0/m-Q8_0-00001-of-00002.gguf", "Q8_0/m-Q8_0-00002-of-00002.gguf"]
    with pytest.raises(ModelError, match="several files have this name") as caught:
        found("Q8_0", *parts)
    assert all(f"{MODEL}:{part}" in str(caught.value) for part in parts)
