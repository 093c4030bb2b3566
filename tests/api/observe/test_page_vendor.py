"""The page's libraries are the published files, with their licences."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

from chairlift.api.observe import page

VENDOR = Path(page.__file__).parent / "ui" / "vendor"
ROW = re.compile(
    r"^\| `([^`]+)` \| `([^@`]+)@([^`]+)` \(([^|]+)\) \| .* \| `([0-9a-f]{64})` \|$", re.M
)


def test_the_files_are_those_that_the_table_names() -> None:
    rows = ROW.findall((VENDOR / "README.md").read_text())
    assert {name for name, *_ in rows} == {path.name for path in VENDOR.glob("*.*js")}
    for name, package, version, _, checksum in rows:
        content = (VENDOR / name).read_bytes()
        assert hashlib.sha256(content).hexdigest() == checksum, name
        # The version in the table is that of the file.
        assert version.encode() in content, name
        assert (VENDOR / f"LICENSE.{package}").stat().st_size > 1000
