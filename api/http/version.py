"""The version of Chairlift."""

from importlib.metadata import PackageNotFoundError, version


def own_version() -> str:
    """The version that is installed; "0+checkout" if Python finds the code by PYTHONPATH only."""
    try:
        return version("chairlift")
    except PackageNotFoundError:
        return "0+checkout"


VERSION = own_version()
