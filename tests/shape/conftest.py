"""What the shape tests read: the tracked files, pyproject.toml, the rooms."""

from __future__ import annotations

import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="session")
def tracked(root: Path) -> list[Path]:
    """Files that git tracks and that exist, relative to the root."""
    command = ["git", "-C", str(root), "ls-files", "-z"]
    names = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    files = [Path(name) for name in names.split("\0") if name]
    assert len(files) > 20, "git lists almost nothing: every scan below would be empty"
    return [path for path in files if (root / path).is_file()]


@pytest.fixture(scope="session")
def python_sources(root: Path, tracked: list[Path]) -> dict[Path, str]:
    """Tracked Python files and their text."""
    return {path: (root / path).read_text("utf-8") for path in tracked if path.suffix == ".py"}


@pytest.fixture(scope="session")
def pyproject(root: Path) -> dict[str, Any]:
    return tomllib.loads((root / "pyproject.toml").read_text("utf-8"))


@pytest.fixture(scope="session")
def rooms() -> tuple[str, ...]:
    """Folders that are imported as headrace.<room>: the table of docs/architecture.md."""
    return (
        *("core", "kernels", "model", "engine", "kvstore", "prefill", "decode", "vision"),
        *("router", "cluster", "configs"),
    )


@pytest.fixture(scope="session")
def room_files(root: Path, rooms: tuple[str, ...]) -> list[Path]:
    """Every file below a room, tracked or not, without what Python leaves behind."""
    return sorted(
        path.relative_to(root)
        for room in rooms
        for path in (root / room).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    )
