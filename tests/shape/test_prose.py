"""What the prose points at exists, and the commands that it names are the ones that CI runs."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
FILE = re.compile(r"`([a-z][\w.-]*(?:/[\w.-]+)+\.\w+|[a-z]\w*\.py)`")


def missing_links(document: Path) -> list[str]:
    """Returns the relative links of a Markdown file that lead nowhere."""
    text = re.sub(r"^```.*?^```", "", document.read_text("utf-8"), flags=re.DOTALL | re.MULTILINE)
    targets = [target.split("#")[0] for target in LINK.findall(text) if "://" not in target]
    return [t for t in targets if t and not (document.parent / t).exists()]


def test_links_resolve(root: Path, tracked: list[Path]) -> None:
    documents = [path for path in tracked if path.suffix == ".md"]
    assert Path("README.md") in documents
    assert {str(p): bad for p in documents if (bad := missing_links(root / p))} == {}


def test_missing_link_is_found(tmp_path: Path) -> None:
    (tmp_path / "there.md").touch()
    document = tmp_path / "a.md"
    document.write_text(
        "[a](there.md#part) [b](gone.md) [c](https://x.example/d)\n```\n[d](e)\n```\n"
    )
    assert missing_links(document) == ["gone.md"]


def missing_files(text: str, tracked: list[Path]) -> list[str]:
    """Returns the Python files and the paths in backticks that no tracked file ends with."""
    named = FILE.findall(text)
    known = [f"/{path}" for path in tracked]
    return [name for name in named if not any(path.endswith(f"/{name}") for path in known)]


def test_files_that_the_prose_names_exist(root: Path, tracked: list[Path]) -> None:
    """LOG.md tells of its day; what it names may be gone."""
    documents = [path for path in tracked if path.suffix == ".md" and path.name != "LOG.md"]
    found = {str(p): missing_files((root / p).read_text("utf-8"), tracked) for p in documents}
    assert {path: names for path, names in found.items() if names} == {}
    assert sum(len(FILE.findall((root / p).read_text("utf-8"))) for p in documents) > 50


def test_a_missing_file_is_found() -> None:
    text = "`core/a.py` and `a.py`, `b.py` (`core/c.yaml`, `pins.json`, `_more.py`)"
    assert missing_files(text, [Path("core/a.py")]) == ["b.py", "core/c.yaml"]


def test_make_help_names_every_target(root: Path) -> None:
    makefile = (root / "Makefile").read_text("utf-8")
    phony = re.search(r"^\.PHONY: (.*)$", makefile, re.MULTILINE)
    assert phony is not None
    command = ["make", "-s", "-C", str(root), "help"]
    shown = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    targets = [line.split()[1] for line in shown.splitlines()]
    assert targets == phony[1].split()
    assert len(targets) <= 9


def test_ci_runs_the_commands_of_the_readme(root: Path) -> None:
    readme = (root / "README.md").read_text("utf-8")
    code = "\n".join(re.findall(r"^```[a-z]*\n(.*?)^```", readme, re.DOTALL | re.MULTILINE))
    assert re.search(r"^make serve\b", code, re.MULTILINE)
    assert re.search(r"^make test\b", code, re.MULTILINE)
    script = (root / ".ci/run").read_text("utf-8")
    assert re.search(r"^make test\b", script, re.MULTILINE)
    assert re.search(r"^make lint\b", script, re.MULTILINE)


def test_decisions_are_short_and_numbered(root: Path) -> None:
    decisions = sorted((root / "docs/decisions").glob("[0-9]*.md"))
    numbers = [path.name[:4] for path in decisions]
    assert numbers == [f"{i:04d}" for i in range(1, len(numbers) + 1)]
    for path in decisions:
        lines = path.read_text("utf-8").splitlines()
        assert lines[0].startswith(f"# {path.name[:4]}: "), path
        assert len(lines) <= 60, path
