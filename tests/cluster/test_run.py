"""Files and processes of a run: state, secrets, lock, and ending exactly one session."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from headrace.cluster import session
from headrace.cluster.holders import ray_environment
from headrace.cluster.rundir import Phase, RunDir, RunState, known_clusters, lock_run
from headrace.cluster.sockets import Listener, listeners, refuse_open_listeners
from headrace.core.errors import ConfigError

# A leader with two children; one has its own process group, one takes no SIGTERM.
FAMILY = """
import os, signal, subprocess, sys, time
stay = "print(flush=True); time.sleep(600)"
stubborn = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); " + stay
plain = "import os, time; os.setpgid(0, 0); " + stay
for code in (stubborn, plain):
    child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    child.stdout.readline()
print("up", flush=True)
time.sleep(600)
"""


@pytest.fixture
def family() -> Iterator[Callable[[], RunState]]:
    started: list[subprocess.Popen[str]] = []

    def start() -> RunState:
        process = subprocess.Popen(
            [sys.executable, "-c", FAMILY],
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        started.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == "up\n"
        return state_of(process.pid)

    yield start
    for process in started:
        for member in session.session_members(process.pid):
            os.kill(member.pid, signal.SIGKILL)
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def state_of(pid: int) -> RunState:
    leader = session.read_process(pid)
    assert leader is not None
    return RunState(
        cluster="x",
        phase=Phase.READY,
        progress="",
        error="",
        pid=pid,
        sid=leader.sid,
        started_ticks=leader.started_ticks,
        boot_id=session.machine_boot_id(),
        processes="one",
        model="t1",
        url="",
        build="test",
    )


def test_end_run_ends_one_session_and_touches_no_other(family: Callable[[], RunState]) -> None:
    ours, other = family(), family()
    assert len(session.run_members(ours)) == len(session.run_members(other)) == 3
    said: list[str] = []
    left = session.end_run(ours, leader_s=5.0, members_s=0.5, progress=said.append)
    assert left == []
    assert session.run_members(ours) == []
    assert said == ["asking the leader to stop", "ending what is left"]
    assert len(session.run_members(other)) == 3


def test_members_of_a_killed_leader_are_found_and_ended(family: Callable[[], RunState]) -> None:
    ours = family()
    os.kill(ours.pid, signal.SIGKILL)
    until(lambda: not session.leader_alive(ours))
    assert len(session.run_members(ours)) == 2
    assert session.end_run(ours, leader_s=5.0, members_s=0.5) == []
    assert session.run_members(ours) == []


def test_a_stopped_member_is_ended_too(family: Callable[[], RunState]) -> None:
    ours = family()
    for member in session.run_members(ours):
        os.kill(member.pid, signal.SIGSTOP)
    until(lambda: all(member.state == "T" for member in session.run_members(ours)))
    assert session.end_run(ours, leader_s=0.2, members_s=1.0) == []
    assert session.run_members(ours) == []


def test_a_reused_id_is_nobody_of_ours(family: Callable[[], RunState]) -> None:
    stranger = family()
    for wrong in (
        replace(stranger, started_ticks=stranger.started_ticks - 1),
        replace(stranger, boot_id="another life of this machine"),
        replace(stranger, sid=0, pid=0),
        replace(stranger, sid=1, pid=1),
    ):
        assert session.run_members(wrong) == []
        assert session.end_run(wrong, leader_s=0.1, members_s=0.1) == []
    assert len(session.run_members(stranger)) == 3


def test_state_file_round_trip_and_damage(tmp_path: Path) -> None:
    run = RunDir(tmp_path, "abc")
    assert run.read_state() is None
    run.create()
    state = replace(state_of(os.getpid()), cluster="abc")
    run.write_state(state)
    assert run.read_state() == state
    assert [found.cluster for found in known_clusters(tmp_path)] == ["abc"]
    text = run.state_file.read_text()
    for damaged in ("", text[:40], text.replace('"ready"', '"odd"'), "[]", "{}"):
        run.state_file.write_text(damaged)
        assert run.read_state() is None


def test_folders_and_secrets_are_private(tmp_path: Path) -> None:
    run = RunDir(tmp_path, "abc")
    run.create()
    for folder in (run.path, run.logs, run.short_dir):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    tokens = set()
    threads = [threading.Thread(target=lambda: tokens.add(run.cluster_token())) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(tokens) == 1  # whoever came first; the others took that one
    assert len(tokens.pop()) == 64
    assert stat.S_IMODE((run.path / "token").stat().st_mode) == 0o600
    assert run.ray_token_file().read_text() != run.cluster_token()
    (run.path / "token").chmod(0o644)
    run.cluster_token()
    assert stat.S_IMODE((run.path / "token").stat().st_mode) == 0o600
    assert not [name for name in os.listdir(run.path) if name.endswith(".tmp")]


def test_socket_paths_fit_however_deep_the_home_is(tmp_path: Path) -> None:
    shallow = RunDir(Path("/srv/h"), "abc")
    deep = RunDir(tmp_path / ("x" * 60) / ("y" * 60), "abc")
    assert shallow.store_address == "unix:///srv/h/abc/store.sock"
    for run in (shallow, deep):
        for path in (run.store_address.removeprefix("unix://"), str(run.valkey_socket)):
            assert len(path.encode()) <= 107
    assert deep.short_dir != RunDir(deep.home, "abd").short_dir


@pytest.mark.parametrize("temp", ["/tmp", "/srv/t", "/srv/" + "t" * 60])
def test_sockets_of_ray_fit_however_deep_the_temporary_folder_is(
    monkeypatch: pytest.MonkeyPatch, temp: str
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", temp)
    run = RunDir(Path("/srv") / ("x" * 60) / ("y" * 60), "abc")
    longest = "ray/session_2026-12-01_10-55-33_382898_4194304/sockets/plasma_store"
    assert len(os.fsencode(run.short_dir / longest)) <= 107
    assert run.short_dir.is_relative_to(temp if len(temp) < 20 else "/tmp")
    assert run.sockets == run.short_dir


def test_one_leader_a_run(tmp_path: Path) -> None:
    run = RunDir(tmp_path, "abc")
    run.create()
    handle = lock_run(run)
    assert handle is not None
    assert lock_run(run) is None
    os.close(handle)
    again = lock_run(run)
    assert again is not None
    os.close(again)


@pytest.mark.parametrize("name", ["", "A", "a/b", "..", "-a", "a" * 33, "a b"])
def test_names_that_are_no_folder(name: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError):
        RunDir(tmp_path, name)


LISTEN = """
import socket, sys
s = socket.create_server((sys.argv[1], 0), family=int(sys.argv[2]), dualstack_ipv6=False)
print(s.getsockname()[1], flush=True); sys.stdin.read()
"""


@pytest.mark.parametrize(
    ("host", "family", "loopback"),
    [("127.0.0.1", 2, True), ("0.0.0.0", 2, False), ("::1", 10, True), ("::", 10, False)],
)
def test_listeners_are_seen_as_they_are(host: str, family: int, loopback: bool) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", LISTEN, host, str(family)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with process:
        assert process.stdout is not None
        line = process.stdout.readline()
        if not line and family == 10:
            pytest.skip("no IPv6 here")
        assert listeners([process.pid]) == [Listener(host, int(line), process.pid)]
        if loopback:
            refuse_open_listeners([process.pid], [])
        else:
            with pytest.raises(ConfigError, match=f"{host}:{line.strip()}"):
                refuse_open_listeners([process.pid], ["127.0.0.1"])
            refuse_open_listeners([process.pid], [host])
        process.communicate("")


def until(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "did not come about"
        time.sleep(0.01)


def test_ray_without_authentication_is_refused_unless_asked_for(tmp_path: Path) -> None:
    run = RunDir(tmp_path, "abc")
    run.create()
    for mode in ("disabled", "", "TOKEN", "k8s"):
        with pytest.raises(ConfigError, match="--insecure"):
            ray_environment(run, {"RAY_AUTH_MODE": mode}, insecure=False)
    assert ray_environment(run, {"RAY_AUTH_MODE": "disabled"}, insecure=True)["RAY_AUTH_MODE"] == (
        "disabled"
    )
    for environ in ({}, {"RAY_AUTH_MODE": "token"}):
        made = ray_environment(run, environ, insecure=False)
        assert made["RAY_AUTH_MODE"] == "token"
        assert len(Path(made["RAY_AUTH_TOKEN_PATH"]).read_text()) == 64
        assert made["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] == "0"
