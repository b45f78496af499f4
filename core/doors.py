"""Doors that open when somebody comes: a package's names are imported at their first use.

A package whose parts need torch can so be asked for one that does not, in a tenth of a second
instead of several. Its `__init__` holds the imports of its names for type checkers alone:

    if TYPE_CHECKING:
        from headrace.model.layout import CacheLayout
    else:
        __getattr__ = names_of(__name__, __file__)
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path


def names_of(package: str, file: str) -> Callable[[str], object]:
    """The package's `__getattr__`. Where its names live is read from the imports under
    `if TYPE_CHECKING:` in `file`, its `__init__`; a name once used stays in the package."""
    homes: dict[str, str] = {}
    for block in ast.parse(Path(file).read_bytes()).body:
        if isinstance(block, ast.If) and ast.unparse(block.test) == "TYPE_CHECKING":
            for line in block.body:
                assert isinstance(line, ast.ImportFrom) and line.module is not None, ast.dump(line)
                homes |= {name.asname or name.name: line.module for name in line.names}

    def find(name: str) -> object:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value: object = getattr(import_module(homes[name]), name)
        setattr(sys.modules[package], name, value)
        return value

    return find
