"""The embedded server: reachable by its socket only, and gone with whoever started it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import redis

from headrace.core.errors import ConfigError
from headrace.kvstore import embedded_valkey

PROCESS = Path(__file__).with_name("store_process.py")


def test_it_listens_on_its_socket_only_and_never_evicts(own_valkey, home):
    client = redis.Redis.from_url(own_valkey.url)
    assert client.ping()
    assert client.config_get("port")["port"] == "0"
    assert client.config_get("maxmemory-policy")["maxmemory-policy"] == "noeviction"
    assert client.config_get("save")["save"] == ""
    client.close()
    assert (Path(home) / "valkey.sock").stat().st_mode & 0o777 == 0o700
    own_valkey.stop()
    own_valkey.stop()
    assert own_valkey.process.returncode is not None


@pytest.mark.fault
def test_it_ends_with_a_parent_that_is_killed(home):
    parent = subprocess.Popen(
        [sys.executable, "-P", str(PROCESS), "valkey", json.dumps({"home": home})],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert parent.stdout is not None and parent.stdin is not None
    child = int(parent.stdout.readline())
    os.kill(child, 0)
    parent.send_signal(signal.SIGKILL)
    parent.wait(10)
    deadline_s = time.monotonic() + 10
    while Path(f"/proc/{child}/stat").exists():
        if Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
            break  # dead; nobody here reaps it
        assert time.monotonic() < deadline_s, "the server outlived its parent"
        time.sleep(0.02)
    parent.stdout.close()
    parent.stdin.close()


@pytest.mark.fault
def test_a_stopped_one_can_be_stopped(own_valkey):
    os.kill(own_valkey.process.pid, signal.SIGSTOP)
    own_valkey.stop()
    assert own_valkey.process.returncode is not None


def test_it_is_refused_where_it_would_not_work(home):
    errors: list[str] = []

    def start() -> None:
        try:
            embedded_valkey(home)
        except ConfigError as error:
            errors.append(error.message)

    thread = threading.Thread(target=start)
    thread.start()
    thread.join()
    assert errors == ["embedded_valkey must be called from the main thread"]
    with pytest.raises(ConfigError, match="at most 107 bytes"):
        embedded_valkey(f"{home}/{'x' * 100}")
    with pytest.raises(ConfigError, match="ended at start"):
        embedded_valkey(home, options=("--no-such-option", "1"))
