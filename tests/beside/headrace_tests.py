"""Files of the tests as modules: with `--import-mode=importlib` they cannot import each other.

This folder is on the path of every test (`pythonpath` in pyproject.toml), so that a conftest.py can
say `from headrace_tests import module`.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parents[2]


def module(path: str) -> ModuleType:
    """The file `path` of the repository, run once a process; from then on it can be imported as
    headrace_ and its path with underscores: `headrace_tests_flow_engines`."""
    name = "headrace_" + path.removesuffix(".py").replace("/", "_")
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, ROOT / path)
        assert spec is not None and spec.loader is not None
        sys.modules[name] = importlib.util.module_from_spec(spec)  # dataclasses look it up
        try:
            spec.loader.exec_module(sys.modules[name])
        except BaseException:
            del sys.modules[name]
            raise
    return sys.modules[name]
