"""Caps on the tail: a file has at most 400 lines (a kernel file 600), a function at most 60."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

FILE_LINES = 400
KERNEL_FILE_LINES = 600
FUNCTION_LINES = 60

# path, or path:function -> (lines it may have, why it is better long)
EXCEPTIONS: dict[str, tuple[int, str]] = {}


def functions(source: str) -> Iterator[tuple[str, int]]:
    """Yields qualified name and number of lines, decorators and docstring included."""

    def walk(node: ast.AST, prefix: str) -> Iterator[tuple[str, int]]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                name = prefix + child.name
                if not isinstance(child, ast.ClassDef):
                    first = min([child.lineno, *(d.lineno for d in child.decorator_list)])
                    assert child.end_lineno is not None
                    yield name, child.end_lineno - first + 1
                yield from walk(child, name + ".")
            else:
                yield from walk(child, prefix)

    return walk(ast.parse(source), "")


def oversized(sources: dict[Path, str]) -> dict[str, tuple[int, int]]:
    """Returns what is longer than its cap: (lines, cap) by path or path:function."""
    found = {}
    for path, source in sources.items():
        cap = KERNEL_FILE_LINES if path.parts[0] == "kernels" else FILE_LINES
        if (lines := source.count("\n")) > cap:
            found[str(path)] = (lines, cap)
        for name, lines in functions(source):
            if lines > FUNCTION_LINES:
                found[f"{path}:{name}"] = (lines, FUNCTION_LINES)
    return found


def test_nothing_is_longer_than_its_cap(python_sources: dict[Path, str]) -> None:
    found = oversized(python_sources)
    too_long = {k: v for k, v in found.items() if v[0] > EXCEPTIONS.get(k, (v[1], ""))[0]}
    assert not too_long, "(lines, cap): split it, or name it in EXCEPTIONS with a reason"


def test_exceptions_are_still_needed(python_sources: dict[Path, str]) -> None:
    found = oversized(python_sources)
    assert {name for name in EXCEPTIONS if name not in found} == set()
    assert all(reason for _, reason in EXCEPTIONS.values())


def test_caps_catch_a_planted_sample() -> None:
    method = "class C:\n    @property\n    def long(self):\n" + "        x = 1\n" * 59
    assert oversized({Path("core/a.py"): method}) == {"core/a.py:C.long": (61, 60)}
    assert oversized({Path("core/a.py"): "x = 1\n" * 401}) == {"core/a.py": (401, 400)}
    assert oversized({Path("kernels/a.py"): "x = 1\n" * 600}) == {}
    assert oversized({Path("kernels/a.py"): "x = 1\n" * 601}) == {"kernels/a.py": (601, 600)}
