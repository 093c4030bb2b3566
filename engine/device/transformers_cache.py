"""Caches the list that transformers makes of its own classes each time it is imported.

At each import transformers 5 reads some 2,000 of its source files, twice, to find out which class
is in which file: a second of the start of every process. The list changes only when another release
is installed, so it is kept in the cache folder.
"""

from __future__ import annotations

import functools
import importlib.machinery
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from hashlib import sha256
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec

from chairlift.engine.config import cache_dir
from chairlift.engine.device.cache_files import write_whole

# Maps backends to files, and these to classes.
Scan = dict[frozenset[str], dict[str, set[str]]]
# As pairs, since JSON's keys are strings.
_Cached = list[tuple[frozenset[str], dict[str, set[str]]]]
# The function's arguments are a folder, and a prefix for the names of the files.
Scanner = Callable[[Any, str | None], Scan]

_MODULE = "transformers.utils.import_utils"
_FUNCTION = "define_import_structure"


def cache_transformers_scan() -> None:
    """Makes the next import of transformers take the list from the cache, or write it there.

    Does nothing if transformers is imported already, is not installed from a wheel, or has no such
    scan. A cache that cannot be read or written costs the scan.
    """
    if "transformers" in sys.modules or (package := _installed()) is None:
        return
    sys.meta_path.insert(0, _Finder(package))


def _installed() -> Distribution | None:
    """The installed package; None if there is none, or if its files may change (editable)."""
    try:
        package = distribution("transformers")
    except PackageNotFoundError:
        return None
    return None if package.read_text("direct_url.json") else package


class _Finder(MetaPathFinder):
    """Finds the module with the scan, in order to replace the function once it is loaded."""

    def __init__(self, package: Distribution) -> None:
        self._package = package

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != _MODULE:
            return None
        sys.meta_path.remove(self)
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        if spec is not None and spec.loader is not None:
            spec.loader = _Replacing(spec.loader, self._package)
        return spec


class _Replacing(Loader):
    """Loads the module and replaces the function."""

    def __init__(self, loader: Loader, package: Distribution) -> None:
        self._loader = loader
        self._package = package

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        scan = getattr(module, _FUNCTION, None)
        if scan is not None:
            models = Path(str(self._package.locate_file("transformers"))) / "models"
            setattr(module, _FUNCTION, cached(scan, models, _file_for(self._package, models)))


def cached(scan: Scanner, models: Path, file: Path) -> Scanner:
    """``scan``, which reads ``models`` only if ``file`` has no result of it."""

    @functools.cache
    def classes() -> Scan:
        with suppress(OSError, msgspec.DecodeError):
            return dict(msgspec.json.decode(file.read_bytes(), type=_Cached))
        found = scan(models, None)
        with suppress(OSError):
            write_whole(file, msgspec.json.encode(list(found.items()), order="deterministic"))
        return found

    def wrapped(path: Any, prefix: str | None = None) -> Scan:
        if Path(path) not in (models, models / "__init__.py"):  # one model's folder
            return scan(path, prefix)
        start = "" if prefix is None else f"{prefix}."
        return {
            backends: {start + name: set(found) for name, found in files.items()}
            for backends, files in classes().items()
        }

    return wrapped


def _file_for(package: Distribution, models: Path) -> Path:
    """The cache file of this installation: a new one after each ``pip install``."""
    installed = package.read_text("RECORD") or ""
    key = sha256(f"{package.version}\n{models}\n{sys.version}\n{installed}".encode()).hexdigest()
    return cache_dir() / "transformers" / f"classes-{key[:32]}.json"
