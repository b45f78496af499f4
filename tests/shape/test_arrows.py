"""import-linter holds the arrows between the rooms: every import that is not allowed is caught.

The tables here are written anew from docs/architecture.md, so they check the contracts of
pyproject.toml and are not derived from them.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

MAY_IMPORT = {
    "core": "",
    "kernels": "",
    "model": "core kernels",
    "engine": "core model kernels",
    "kvstore": "core",
    "prefill": "core engine kvstore",
    "decode": "core engine kvstore",
    "vision": "core model kvstore",
    "router": "core kvstore",
    "cluster": "core kernels model engine kvstore prefill decode vision router",
}
# library -> rooms that may import it themselves
LIBRARIES = {
    "ray": "cluster",
    "redis": "kvstore",
    "triton": "kernels",
    "PIL": "vision",
    "torch": "kernels model engine prefill decode vision cluster",
}


@pytest.fixture(scope="module")
def copy(root: Path, rooms: tuple[str, ...], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The rooms' Python files laid out as a package headrace, beside pyproject.toml."""
    folder = tmp_path_factory.mktemp("arrows")
    shutil.copy(root / "pyproject.toml", folder)
    for room in rooms:
        for path in (root / room).rglob("*.py"):
            target = folder / "headrace" / path.relative_to(root)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, target)
    return folder


def lint_imports(folder: Path) -> tuple[int, str]:
    program = "from importlinter.cli import lint_imports_command as c; c()"
    command = [sys.executable, "-P", "-c", program, "--no-cache"]
    done = subprocess.run(
        command,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(folder), "NO_COLOR": "1", "COLUMNS": "200"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    return done.returncode, done.stdout + done.stderr


def test_arrows_are_kept(copy: Path) -> None:
    code, report = lint_imports(copy)
    assert code == 0, report
    assert re.search(r"Contracts: \d+ kept, 0 broken", report)


def test_every_forbidden_import_is_caught(copy: Path, tmp_path: Path) -> None:
    shutil.copytree(copy, tmp_path, dirs_exist_ok=True)
    planted, allowed = set(), set()
    for room, may in MAY_IMPORT.items():
        imports = {
            f"headrace.{other}": other in may.split() for other in MAY_IMPORT if other != room
        }
        imports |= {library: room in users.split() for library, users in LIBRARIES.items()}
        for imported, legal in imports.items():
            module = f"planted_{imported.replace('.', '_')}"
            (tmp_path / "headrace" / room / f"{module}.py").write_text(f"import {imported}\n")
            (allowed if legal else planted).add((f"headrace.{room}.{module}", imported))
    code, report = lint_imports(tmp_path)
    assert code == 1, report
    # A finding is a chain of imports; only a chain's own head counts: "-   a -> b (l.1)".
    heads = set(re.findall(r"^- +(headrace\.\w+\.planted_\w+) -> ([\w.]+) \(l\.1\)$", report, re.M))
    assert planted - heads == set(), "these imports pass unseen"
    assert heads & allowed == set(), "these imports are legal"
