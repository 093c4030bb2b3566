"""A damaged model's folder gives one line that names it, in each step of the start."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.damage import damaged_copy, damages
from support.tiny import tiny_model_dir

from chairlift.api.text.chat_format import chat_format
from chairlift.engine.config import EngineConfig
from chairlift.engine.core.loop import run
from chairlift.engine.errors import ModelError
from chairlift.engine.hub.folder_check import check_directory
from chairlift.engine.hub.source import ModelSource
from chairlift.engine.messages import FromEngine, ModelInfo, Shutdown, StartFailed, ToEngine
from chairlift.engine.model.architecture import check_architecture
from chairlift.engine.model.text.tokenizer import load_tokenizer


class _Ends:
    """An inbox whose only message ends the engine."""

    def receive(self, block: bool) -> Iterable[ToEngine]:
        return [Shutdown()]

    def wake(self) -> None:
        pass


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model_dir(tmp_path_factory.mktemp("models"), "llama")


def _assert_one_line(text: str, path: Path) -> None:
    assert "\n" not in text
    assert str(path) in text
    assert len(text) < 1000


@pytest.mark.slow
@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_each_damage_is_harmless_or_one_line(
    data: st.DataObject, folder: Path, tmp_path: Path
) -> None:
    path = damaged_copy(folder, tmp_path / "damaged", data.draw(damages(folder)))
    source = ModelSource("tiny", "directory", path)
    try:
        check_architecture(path, check_directory(path))
    except ModelError as error:
        _assert_one_line(str(error), path)
    try:
        chat_format(load_tokenizer(source), None, None)
    except ModelError as error:
        _assert_one_line(str(error), path)
    sent: list[FromEngine] = []
    run(EngineConfig(max_rows=2, kv_memory=8 << 20), source, _Ends(), sent.append)
    match sent[-1]:
        case StartFailed(message):
            _assert_one_line(message, path)
        case other:
            assert isinstance(other, ModelInfo)
