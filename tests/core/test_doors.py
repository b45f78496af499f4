"""Packages whose names are imported at their first use."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

ASK = """
import importlib, json, sys
door = importlib.import_module(sys.argv[1])
before = "torch" in sys.modules
found = {name: getattr(door, name).__class__.__name__ for name in door.__all__}
kept = all(name in vars(door) for name in door.__all__)
try:
    door.no_such_name
except AttributeError as error:
    said = str(error)
print(json.dumps([before, len(found), kept, said]))
"""


@pytest.mark.parametrize(
    "package", ["headrace.kernels", "headrace.model", "headrace.model.checkpoint"]
)
def test_every_name_of_a_door_is_there_and_torch_comes_with_the_first_that_needs_it(
    package: str,
) -> None:
    done = subprocess.run(
        [sys.executable, "-c", ASK, package], capture_output=True, text=True, check=True
    )
    before, n_found, kept, said = json.loads(done.stdout)
    assert not before and kept and n_found > 5
    assert said == f"module '{package}' has no attribute 'no_such_name'"
