"""What scenarios share: the framework as `kinds`, and the small cluster of tests/flow."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

TESTS = Path(__file__).parent.parent


def beside(path: str) -> ModuleType:
    """A file below tests/ as a module: test files cannot import each other by name."""
    name = "headrace_tests_" + path.removesuffix(".py").replace("/", "_")
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, TESTS / path)
        assert spec is not None and spec.loader is not None
        sys.modules[name] = importlib.util.module_from_spec(spec)  # dataclasses look it up
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


@pytest.fixture(scope="session")
def kinds() -> ModuleType:
    """The module scenario.py: `kinds.Scenario`, `kinds.Fault`, `kinds.kill` and the others."""
    return beside("faults/scenario.py")
