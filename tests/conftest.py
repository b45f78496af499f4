"""What every test shares: one thread a process, and property tests without a time limit a case."""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

import pytest
from hypothesis import settings

# Before torch is imported. Two OpenMP pools on one core were measured 4 to 27 times slower.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Likewise: where bytecode is kept by nobody, every process that a test starts compiles torch anew,
# which was measured to double the 1.6 s of processor time of the rooms' imports.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# Unix sockets lie in folders that tests make, and their paths have 107 bytes.
if len(tempfile.gettempdir()) > 24:
    tempfile.tempdir = os.environ["TMPDIR"] = "/tmp"

settings.register_profile("headrace", deadline=None, print_blob=True)
# Many examples, others every time: --hypothesis-profile=large (tests/model/properties/conftest.py).
settings.register_profile("large", deadline=None, print_blob=True, max_examples=2000)
settings.load_profile("headrace")

# Fixtures that start processes which import torch: 5 s, or minutes on a busy machine. They count
# towards the limit of the first test that wants them.
SLOW_STARTS = {"processes", "victims", "cluster_with_store_process"}
SLOW_START_LIMIT_S = 600


@pytest.fixture(scope="session")
def root() -> Path:
    """The repository's top folder."""
    return Path(__file__).resolve().parent.parent


@pytest.hookimpl(tryfirst=True)  # before xdist reads the groups
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """With `-n`, a file's tests stay together and in order; all of a folder `live` do, since they
    share one cluster and its last ones end it. Whichever comes first starts it, which takes
    minutes on a busy machine; so do processes of other tests."""
    for item in items:
        live = "live" in item.path.parts
        item.add_marker(pytest.mark.xdist_group(str(item.path.parent if live else item.path)))
        slow = live or not SLOW_STARTS.isdisjoint(getattr(item, "fixturenames", ()))
        if slow and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(SLOW_START_LIMIT_S))
