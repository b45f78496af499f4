"""A forked process of tests/beside is what a start of its own would be."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
from headrace_tests import module

forks = module("tests/beside/forks.py")

SCRIPT = """
import atexit, json, os, signal, sys, threading, time
atexit.register(lambda: open(sys.argv[2], "w").write("over"))
print(json.dumps({"name": __name__, "argv": sys.argv, "env": dict(os.environ), "pid": os.getpid(),
                  "session": os.getsid(0), "threads": threading.active_count(),
                  "descriptors": len(os.listdir("/proc/self/fd")),
                  "torch": "torch" in sys.modules}), flush=True)
if sys.argv[1] == "sleeps":
    time.sleep(600)
sys.exit(7)
"""


@pytest.fixture
def script(tmp_path: Path) -> str:
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    return str(path)


def start(script: str, how: str, over: Path, **more: Any) -> tuple[Any, dict[str, Any]]:
    environment = {"PATH": "/bin", "WHO": how}
    process, line = forks.fork_and_hear([script, how, str(over)], environment, **more)
    return process, json.loads(line)


def test_it_has_its_own_name_arguments_environment_and_end(script: str, tmp_path: Path) -> None:
    over = tmp_path / "over"
    process, said = start(script, "ends", over)
    assert process.wait(20.0) == 7 == process.returncode
    assert over.read_text() == "over"  # an interpreter that ended as every other
    assert not Path(f"/proc/{process.pid}").exists()
    assert said["name"] == "__main__"
    assert said["argv"] == [script, "ends", str(over)]
    assert said["env"] == {"PATH": "/bin", "WHO": "ends"}
    assert (said["pid"], said["threads"]) == (process.pid, 1)
    assert said["torch"]  # imported before it began: what this is for
    assert process.pid != os.getpid()


def test_a_kill_hits_one_alone(script: str, tmp_path: Path) -> None:
    started = [start(script, "sleeps", tmp_path / f"over-{i}") for i in range(2)]
    (one, first), (other, second) = started
    # Nothing of the first is open in the second.
    assert first["descriptors"] == second["descriptors"]
    with pytest.raises(subprocess.TimeoutExpired):
        one.wait(0.0)
    one.kill()
    assert one.wait(20.0) == -signal.SIGKILL
    assert other.returncode is None and Path(f"/proc/{other.pid}").exists()
    other.send_signal(signal.SIGTERM)
    assert other.wait(20.0) == -signal.SIGTERM
    assert not list(tmp_path.glob("over-*"))


def test_a_session_of_its_own_is_had_for_the_asking(script: str, tmp_path: Path) -> None:
    shared, said = start(script, "ends", tmp_path / "over")
    alone, of_its_own = start(script, "ends", tmp_path / "over", new_session=True)
    assert said["session"] == os.getsid(0)
    assert of_its_own["session"] == alone.pid
    assert shared.wait(20.0) == alone.wait(20.0) == 7
