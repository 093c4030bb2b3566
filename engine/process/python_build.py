"""Tells whether this Python was built without optimizations: its code takes 1.4 times as long.

Such a build is pyenv's default; those of distributions, python.org, Homebrew and uv are optimized.
The Makefile runs this file as a script, with any Python: it exits with 0 if an environment for
Chairlift can be made with this Python, and the Python is optimized.
"""

import argparse
import sys
import sysconfig
from importlib.util import find_spec


def is_unoptimized() -> bool:
    """Whether pyenv built this Python without profile-guided optimization."""
    options = sysconfig.get_config_var("CONFIG_ARGS") or ""
    return "/.pyenv/" in options and "--enable-optimizations" not in options


def makes_environments() -> bool:
    """Whether the version is one that Chairlift supports, with ``venv`` and pip for it."""
    return (3, 11) <= sys.version_info < (3, 14) and find_spec("ensurepip") is not None


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()
    sys.exit(is_unoptimized() or not makes_environments())
