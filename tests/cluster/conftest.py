"""Shared by the tests of the cluster room."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def short_temp(
    monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Path]:
    """A folder of few characters in place of the temporary one, removed afterwards: unix socket
    paths have 107 bytes, and pytest's own folders are long."""
    tmp_path_factory.getbasetemp()  # made now, so that it does not come to lie in here
    folder = Path(tempfile.mkdtemp(prefix="hr-"))
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    monkeypatch.setenv("TMPDIR", str(folder))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)
