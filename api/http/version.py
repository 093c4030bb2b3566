"""The version of Chairlift that is installed."""

from importlib.metadata import version

VERSION = version("chairlift")
