"""An installation without extras serves text: nothing that it imports belongs to an extra."""

from __future__ import annotations

import json
import os
import urllib.request
from importlib.metadata import PackageNotFoundError, packages_distributions, requires
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from support.api.server import serving
from support.tiny import tiny_model_dir

# Makes modules as good as not installed, in each process.
_HIDE = """
import importlib.machinery as machinery
HIDDEN = frozenset({hidden!r})
find_spec = machinery.PathFinder.find_spec
def find_shown(name, path=None, target=None):
    return None if name.partition(".")[0] in HIDDEN else find_spec(name, path, target)
machinery.PathFinder.find_spec = find_shown
"""
# They come with Python's environments, not with a package that requires them.
_ALWAYS = {"pip", "setuptools", "wheel"}


def _plain() -> set[str]:
    """The distributions that ``pip install chairlift`` brings."""
    found, open_ = set[str](), ["chairlift"]
    while open_:
        name = canonicalize_name(open_.pop())
        if name in found:
            continue
        try:
            needed = [Requirement(text) for text in requires(name) or ()]
        except PackageNotFoundError:
            continue
        found.add(name)
        for each in needed:
            if each.marker is None or each.marker.evaluate({"extra": ""}):
                open_.append(each.name)
                # An extra of a dependency, such as that of "mlx[cpu]", brings its own.
                if each.extras:
                    open_ += _of_extras(each)
    return found


def _of_extras(requirement: Requirement) -> list[str]:
    try:
        needed = [Requirement(text) for text in requires(requirement.name) or ()]
    except PackageNotFoundError:
        return []
    return [
        each.name
        for each in needed
        if each.marker is not None
        and any(each.marker.evaluate({"extra": extra}) for extra in requirement.extras)
    ]


def _hidden() -> list[str]:
    """The modules of all other distributions."""
    plain = _plain() | _ALWAYS
    return sorted(
        module
        for module, owners in packages_distributions().items()
        if not plain & {canonicalize_name(owner) for owner in owners}
    )


def test_other_packages_are_known() -> None:
    hidden = _hidden()
    assert {"PIL", "mlx_vlm", "openai", "hypothesis"} <= set(hidden)
    assert not {"mlx", "mlx_lm", "numpy", "transformers", "aiohttp", "chairlift"} & set(hidden)


def test_a_text_model_is_served_without_extras(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hiding = tmp_path / "hiding"
    hiding.mkdir()
    (hiding / "sitecustomize.py").write_text(_HIDE.format(hidden=_hidden()))
    before = os.environ.get("PYTHONPATH")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, (str(hiding), before))))
    model = tiny_model_dir(tmp_path, "llama")
    schema = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    body = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 4}
    with serving(tmp_path, str(model)) as server:
        for more in ({}, {"response_format": form}, {"logprobs": True}):
            request = urllib.request.Request(
                f"{server.url}/v1/chat/completions",
                json.dumps(body | more).encode(),
                {"Content-Type": "application/json"},
            )
            with urllib.request.urlopen(request, timeout=180) as reply:
                assert reply.status == 200
