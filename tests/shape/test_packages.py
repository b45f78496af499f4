"""The package list, the folders and the wheel say the same."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest


def test_package_list_equals_the_folders(
    pyproject: dict[str, Any], room_files: list[Path], rooms: tuple[str, ...]
) -> None:
    folders = {path.parent for path in room_files if path.suffix == ".py"}
    expected = {"headrace." + ".".join(folder.parts) for folder in folders}
    assert set(pyproject["tool"]["setuptools"]["packages"]) == expected
    directories = {f"headrace.{room}": room for room in rooms}
    assert pyproject["tool"]["setuptools"]["package-dir"] == directories


def test_every_package_has_a_door(root: Path, pyproject: dict[str, Any]) -> None:
    for package in pyproject["tool"]["setuptools"]["packages"]:
        door = root.joinpath(*package.split(".")[1:], "__init__.py")
        assert door.read_text("utf-8").lstrip().startswith('"""'), f"{door} has no docstring"


def test_no_folder_imports_as_ours_without_being_a_room(root: Path) -> None:
    assert not (root / "headrace").exists()
    assert not list((root / "tests").rglob("__init__.py"))


@pytest.fixture(scope="module")
def wheel(
    root: Path, rooms: tuple[str, ...], tmp_path_factory: pytest.TempPathFactory
) -> zipfile.ZipFile:
    """A wheel built from a copy, so that no build/lib of an older tree can fill a gap."""
    copy, out = tmp_path_factory.mktemp("tree"), tmp_path_factory.mktemp("wheel")
    for room in rooms:
        shutil.copytree(root / room, copy / room, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE", "NOTICE"):
        shutil.copy(root / name, copy / name)
    program = "import sys; from setuptools import build_meta; build_meta.build_wheel(sys.argv[1])"
    # -P: the rooms in the current folder must not be importable as top-level packages.
    command = [sys.executable, "-P", "-c", program, str(out)]
    done = subprocess.run(command, cwd=copy, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    (path,) = out.glob("headrace-*.whl")
    return zipfile.ZipFile(path)


def test_wheel_members_equal_the_tree(wheel: zipfile.ZipFile, room_files: list[Path]) -> None:
    members = {name for name in wheel.namelist() if ".dist-info/" not in name}
    # Prose is for readers of the repository; everything else below a room is needed to run.
    expected = {f"headrace/{path}" for path in room_files if path.suffix != ".md"}
    assert members == expected


def test_wheel_has_command_and_licence(wheel: zipfile.ZipFile) -> None:
    about = [name for name in wheel.namelist() if ".dist-info/" in name]
    (entry_points,) = (wheel.read(name) for name in about if name.endswith("entry_points.txt"))
    assert b"headrace = headrace.cluster.cli:main" in entry_points
    assert {name.split("/")[-1] for name in about} >= {"LICENSE", "NOTICE"}
