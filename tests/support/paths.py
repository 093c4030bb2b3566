"""The checkout's root and the folder of its tests, which subprocesses need on ``sys.path``."""

from __future__ import annotations

from pathlib import Path

TESTS = Path(__file__).parents[1]
ROOT = TESTS.parent
