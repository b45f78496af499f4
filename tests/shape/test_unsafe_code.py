"""Nothing in the repository unpickles, evaluates or hands a string to a shell (check H1)."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

MODULES = {"pickle", "_pickle", "cPickle", "cloudpickle", "dill", "marshal", "shelve", "jsonpickle"}
CALLS = {
    "eval",
    "exec",
    "yaml.load",
    "yaml.load_all",
    "yaml.full_load",
    "yaml.unsafe_load",
    "os.system",
    "os.popen",
    "subprocess.getoutput",
    "subprocess.getstatusoutput",
    "asyncio.create_subprocess_shell",
    "torch.package.PackageImporter",
    "torch.distributed.broadcast_object_list",
    "torch.distributed.all_gather_object",
    "ray.cloudpickle.loads",
}
METHODS = {"recv_pyobj", "send_pyobj"}
MUST_SAY = {"torch.load": ("weights_only", True)}
MUST_NOT_SAY = {"shell": True, "allow_pickle": True, "trust_remote_code": True}


class Scanner(ast.NodeVisitor):
    """Collects (line, what) of one module; follows import aliases, not values."""

    def __init__(self) -> None:
        self.found: list[tuple[int, str]] = []
        self.full_names: dict[str, str] = {}

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            self._module(node.lineno, alias.name)
            self.full_names[alias.asname or alias.name.split(".")[0]] = (
                alias.name if alias.asname else alias.name.split(".")[0]
            )

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        if node.level == 0 and node.module:
            self._module(node.lineno, node.module)
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                self._module(node.lineno, name)
                self.full_names[alias.asname or alias.name] = name

    def _module(self, line: int, name: str) -> None:
        if MODULES & set(name.split(".")):
            self.found.append((line, f"import {name}"))

    def _name(self, node: ast.expr) -> str:
        if isinstance(node, ast.Name):
            return self.full_names.get(node.id, node.id)
        if isinstance(node, ast.Attribute):
            return f"{self._name(node.value)}.{node.attr}"
        return "?"

    def visit_Call(self, node: ast.Call) -> None:
        name = self._name(node.func).removeprefix("builtins.")
        said = {k.arg: getattr(k.value, "value", None) for k in node.keywords if k.arg}
        if name in CALLS or name.rsplit(".", 1)[-1] in METHODS:
            self.found.append((node.lineno, f"{name}()"))
        if name in MUST_SAY and said.get(MUST_SAY[name][0]) is not MUST_SAY[name][1]:
            self.found.append((node.lineno, f"{name}() without {MUST_SAY[name][0]}"))
        for word, value in MUST_NOT_SAY.items():
            if said.get(word) is value:
                self.found.append((node.lineno, f"{word}={value}"))
        if name in ("__import__", "importlib.import_module") and node.args:
            self._module(node.lineno, str(getattr(node.args[0], "value", "")))
        self.generic_visit(node)


def scan(source: str) -> Iterator[str]:
    scanner = Scanner()
    scanner.visit(ast.parse(source))
    return (f"line {line}: {what}" for line, what in scanner.found)


def test_no_unsafe_code(python_sources: dict[Path, str]) -> None:
    assert {str(p): hits for p, source in python_sources.items() if (hits := [*scan(source)])} == {}


@pytest.mark.parametrize(
    "sample",
    [
        "import pickle",
        "import cloudpickle as c",
        "from dill import loads",
        "import marshal",
        "from ray import cloudpickle",
        "__import__('pickle')",
        "import importlib\nimportlib.import_module('shelve')",
        "eval('1')",
        "exec('x = 1')",
        "import builtins\nbuiltins.eval('1')",
        "import yaml\nyaml.load(text, Loader=yaml.SafeLoader)",
        "import yaml as y\ny.unsafe_load(text)",
        "from yaml import load as read\nread(text)",
        "import torch\ntorch.load(path)",
        "import torch as t\nt.load(path, weights_only=False)",
        "socket.recv_pyobj()",
        "import subprocess\nsubprocess.run('ls', shell=True)",
        "import os\nos.system('ls')",
        "import numpy\nnumpy.load(path, allow_pickle=True)",
        "AutoModel.from_pretrained(name, trust_remote_code=True)",
    ],
)
def test_scanner_finds_a_planted_sample(sample: str) -> None:
    assert [*scan(sample)]


def test_scanner_leaves_the_harmless_alone() -> None:
    harmless = """
import re, subprocess, torch, yaml
model.eval(); redis.eval(script, 1); re.compile("x"); yaml.safe_load(text)
torch.load(path, weights_only=True); subprocess.run(["ls"], shell=False)
"""
    assert [*scan(harmless)] == []
