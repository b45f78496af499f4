"""No tracked file names the machine or the package index that made it."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from pathlib import Path
from urllib.parse import urlsplit

import pytest

# Written in pieces, so that this file does not find itself.
FOLDERS = ("wo" + "rk", "ro" + "ot", "fa" + "rm")
HOSTS = ("py" + r"pi\.org", "python" + "hosted", "registry" + r"\.npmjs", "deb" + r"\.debian")
PATHS = re.compile(rf"(?<![\w.~*-])/(?:{'|'.join(FOLDERS)})(?:/|\b(?![\w-]))")
REGISTRIES = re.compile("|".join(HOSTS))


@pytest.fixture(scope="session")
def local_names() -> set[str]:
    """This machine's name and the hosts that its package tools are set up with."""
    command = [sys.executable, "-m", "pip", "config", "list"]
    settings = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    settings += "\n".join(v for k, v in os.environ.items() if k.startswith(("PIP_", "UV_")))
    urls = re.findall(r"https?://[^\s'\"]+", settings)
    hosts = {urlsplit(url).hostname or "" for url in urls} | {socket.gethostname()}
    return {host for host in hosts if len(host) > 4 and host not in ("localhost", "127.0.0.1")}


def private(text: str, local_names: set[str]) -> list[str]:
    hits = [match[0] for match in PATHS.finditer(text)]
    hits += [match[0] for match in REGISTRIES.finditer(text)]
    return hits + [name for name in local_names if re.search(rf"\b{re.escape(name)}\b", text)]


def test_no_private_name(root: Path, tracked: list[Path], local_names: set[str]) -> None:
    found = {}
    for path in tracked:
        text = (root / path).read_bytes().decode("utf-8", "ignore")
        if hits := private(text, local_names):
            found[str(path)] = hits
    assert not found


def test_no_lock_file_and_nothing_built(tracked: list[Path]) -> None:
    built = {".venv", "build", "dist", "__pycache__"}
    assert not [str(p) for p in tracked if p.name == "uv.lock" or built & set(p.parts)]
    assert not [str(p) for p in tracked if ".egg-info" in str(p) or p.suffix in (".whl", ".pyc")]


def test_constraints_hold_names_and_versions_only(root: Path) -> None:
    lines = (root / "constraints.txt").read_text("utf-8").splitlines()
    pins = [line for line in lines if line and not line.startswith("#")]
    assert len(pins) > 50
    assert not [pin for pin in pins if not re.fullmatch(r"[a-z0-9-]+==[0-9][0-9a-z.]*", pin)]


def test_private_catches_planted_samples() -> None:
    work, home = (f"/{name}" for name in FOLDERS[:2])
    planted = f"{work}/main\nHOME={home}\n'{work}'\nhttps://py" + "pi.org/simple build-17.example"
    assert len(private(planted, {"build-17.example"})) == 5
    harmless = f"a{work}/x ./root/x net{work}s {work}ers tests{work}/ frame{home}s"
    assert private(harmless, set()) == []
