"""Makes the package's description out of README.md; everything else is in pyproject.toml.

README's links are relative, and no public address exists that they could be completed with. A
package index would show them as broken, so each becomes its text and the file's path. The sdist
contains these files (MANIFEST.in).
"""

import re
from pathlib import Path

from setuptools import setup

IMAGE = re.compile(r"!\[[^]]*\]\((?!https?:)[^)]*\)\n*")
LINK = re.compile(r"\[([^]]*)\]\((?!https?:)([^)#]+)[^)]*\)")

readme = Path(__file__).with_name("README.md").read_text(encoding="utf-8")
setup(
    long_description=LINK.sub(r"\1 (`\2`)", IMAGE.sub("", readme)),
    long_description_content_type="text/markdown",
)
