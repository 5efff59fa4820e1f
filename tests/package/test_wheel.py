"""The wheel holds the package with its type information, catalogs and page, and nothing else."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

pytestmark = pytest.mark.processes

ROOT = Path(__file__).parents[2]


def test_the_wheel_holds_the_package_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "source").mkdir()
    for name in ("weft", "README.md", "LICENSE", "pyproject.toml"):
        (tmp_path / "source" / name).symlink_to(ROOT / name)
    command = [sys.executable, "-m", "pip", "wheel", str(tmp_path / "source"), "--no-deps", "--no-build-isolation"]
    options = ["--quiet", "--disable-pip-version-check", "--wheel-dir", str(tmp_path)]
    subprocess.run([*command, *options], check=True, capture_output=True, text=True, timeout=300)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
    wanted = [
        *ROOT.glob("weft/**/*.py"),
        *ROOT.glob("weft/**/*.toml"),
        *ROOT.glob("weft/**/*.csv"),
        ROOT / "weft" / "serve" / "http" / "page.html",
        ROOT / "weft" / "py.typed",
    ]
    assert names == {path.relative_to(ROOT).as_posix() for path in wanted}
