"""Names follow docs/words.md: its list of banned identifiers is read from there."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

WORD = re.compile(r"[A-Z]+(?=[A-Z][a-z])|[A-Z]?[a-z]+|[A-Z]+|\d+")

# path:identifier -> why it stays
EXCEPTIONS: dict[str, str] = {}


def listed(text: str, block: str) -> list[str]:
    match = re.search(rf"^```{block}\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    assert match is not None, f"docs/words.md has no block {block}"
    return [line for line in match[1].splitlines() if line.strip()]


@pytest.fixture(scope="session")
def banned(root: Path) -> dict[str, str]:
    """Banned words -> what to say instead."""
    lines = listed((root / "docs/words.md").read_text("utf-8"), "banned-identifiers")
    pairs = [line.split(" -> ") for line in lines]
    return {word: instead for words, instead in pairs for word in words.split()}


def given_names(source: str) -> Iterator[str]:
    """Yields the names that a source gives: not those of libraries, which it merely uses."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr


def offences(source: str, banned: dict[str, str]) -> dict[str, str]:
    """Returns name -> what to say instead, for every name with a banned word in it."""
    found = {}
    for name in given_names(source):
        words = "_".join(["", *(w.lower() for w in WORD.findall(name)), ""])
        for word, instead in banned.items():
            if f"_{word}_" in words:
                found[name] = instead
    return found


def test_no_banned_identifier(python_sources: dict[Path, str], banned: dict[str, str]) -> None:
    found = {
        f"{path}:{name}": f"say {instead}"
        for path, source in python_sources.items()
        for name, instead in offences(source, banned).items()
        if f"{path}:{name}" not in EXCEPTIONS
    }
    assert not found


def test_no_drawer_for_everything(root: Path, tracked: list[Path]) -> None:
    lines = listed((root / "docs/words.md").read_text("utf-8"), "banned-modules")
    names = {word for line in lines for word in line.split()}
    modules = [path for path in tracked if path.suffix == ".py"]
    assert not [str(p) for p in modules if names & {p.stem, *p.parts[:-1]}]


def test_ban_catches_planted_samples(banned: dict[str, str]) -> None:
    sample = "def f(PagedTable, kv_cache): self.num_toks = 1; wait_secs = 2; KVCache = 3\n"
    assert set(offences(sample, banned)) == {
        *("PagedTable", "kv_cache", "num_toks", "wait_secs", "KVCache"),
    }
    fine = "class Pager: pass\ndef pagerank(cached_tokens): n = mmap.PAGESIZE; load_checkpoint = 1"
    assert offences(fine, banned) == {}
