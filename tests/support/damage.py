"""Damages a model's folder in generated ways."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

Damage = Callable[[Path], None]

JSON_VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.integers(-2, 70),
    st.floats(allow_nan=True),
    st.text(max_size=8),
    st.lists(st.integers(), max_size=3),
    st.dictionaries(st.text(max_size=4), st.integers(), max_size=2),
)


class _Edit:
    """A named change of one file, so that a failing example can be read."""

    def __init__(self, name: str, file: str, change: Callable[[bytes], bytes | None]) -> None:
        self.name, self.file, self.change = name, file, change

    def __call__(self, folder: Path) -> None:
        path = folder / self.file
        changed = self.change(path.read_bytes())
        if changed is None:
            path.unlink()
        else:
            path.write_bytes(changed)

    def __repr__(self) -> str:
        return f"{self.name} {self.file}"


def damages(folder: Path) -> st.SearchStrategy[Damage]:
    """Strategies of one damage to a copy of ``folder``."""
    files = sorted(path.name for path in folder.iterdir() if path.is_file())
    texts = [name for name in files if name.endswith(".json")]
    of_any = st.sampled_from(files)
    return st.one_of(
        st.builds(lambda file: _Edit("delete", file, lambda data: None), of_any),
        st.builds(lambda file: _Edit("empty", file, lambda data: b""), of_any),
        st.builds(
            lambda file, share: _Edit(
                f"cut at {share}", file, lambda data: data[: int(len(data) * share)]
            ),
            of_any,
            st.floats(0, 0.99),
        ),
        st.builds(
            lambda file, junk: _Edit(f"{junk!r} instead of", file, lambda data: junk),
            of_any,
            st.binary(min_size=1, max_size=64),
        ),
        st.builds(
            lambda file, value: _Edit(
                f"{value!r} instead of", file, lambda data: json.dumps(value).encode()
            ),
            st.sampled_from(texts),
            JSON_VALUES,
        ),
        st.builds(
            lambda file, index, value: _Edit(
                f"value {index} is {value!r} in",
                file,
                lambda data: json.dumps(_with(json.loads(data), index, value)).encode(),
            ),
            st.sampled_from(texts),
            st.integers(0, 40),
            JSON_VALUES,
        ),
    )


def _with(config: Any, index: int, value: Any) -> Any:
    """``config`` with another value of one of its keys."""
    if not isinstance(config, dict) or not config:
        return value
    key = list(config)[index % len(config)]
    return {**config, key: value}


def damaged_copy(folder: Path, target: Path, damage: Damage) -> Path:
    """A damaged copy of ``folder`` at ``target``, which is replaced."""
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(folder, target)
    damage(target)
    return target
