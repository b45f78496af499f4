"""A start of Ray that misses its limit: what it left behind is gone before the next one begins."""

from __future__ import annotations

import subprocess
import time
from types import SimpleNamespace

import psutil
import pytest

from headrace.cluster import actors


def _children() -> set[int]:
    return {process.pid for process in psutil.Process().children(recursive=True)}


def test_processes_of_a_failed_start_are_ended(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    seen: list[set[int]] = []

    def start(run: object) -> None:
        seen.append(_children())
        if len(seen) < 3:
            subprocess.Popen(["sh", "-c", "sleep 60 & sleep 60"])
            while len(_children()) < len(seen[0]) + 3:  # the shell and both of its sleeps
                time.sleep(0.01)
            raise Exception("The current node timed out during startup.")

    monkeypatch.setattr(actors, "_init_ray", start)
    kept = subprocess.Popen(["sleep", "60"])
    try:
        actors.start_ray(SimpleNamespace(path=tmp_path))
        assert len(seen) == 3 and kept.pid in seen[0]
        assert seen[1] == seen[0] and seen[2] == seen[0]
        assert kept.poll() is None  # was there before
    finally:
        kept.kill()
        kept.wait()


def test_another_failure_is_not_tried_again(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    calls: list[object] = []

    def start(run: object) -> None:
        calls.append(run)
        raise RuntimeError("no such address")

    monkeypatch.setattr(actors, "_init_ray", start)
    with pytest.raises(RuntimeError, match="no such address"):
        actors.start_ray(SimpleNamespace(path=tmp_path))
    assert len(calls) == 1
