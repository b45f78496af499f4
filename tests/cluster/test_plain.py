"""Roles as plain processes without Ray, and a start that is refused."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import fields, replace
from pathlib import Path

import httpx
import pytest
import yaml

from headrace.cluster.config import load_config
from headrace.cluster.http import HttpApi
from headrace.cluster.launch import Launch, LaunchError, end_cluster
from headrace.cluster.roles import role_settings
from headrace.cluster.rundir import Phase, RunDir, RunState, lock_run
from headrace.cluster.session import read_process, run_members
from headrace.core.card import Member, Role
from headrace.core.states import ReplicaState
from headrace.engine import LLM
from headrace.kvstore import MemberBoard, embedded_valkey

HEADRACE = str(Path(sys.executable).parent / "headrace")
PATIENCE_S = 400.0  # with what is going to happen; four processes import torch on a busy machine
ROLES = (("store", "store-0"), ("prefill", "p"), ("decode", "d"), ("router", "router-0"))


@pytest.fixture
def run(short_temp: Path) -> Iterator[RunDir]:
    run = RunDir(short_temp, "plain")
    run.create()
    valkey = embedded_valkey(str(run.sockets))
    yield run
    valkey.stop()


def write(run: RunDir, port: int) -> Path:
    path = run.home / "plain.yaml"
    values = {
        "cluster": "plain",
        "deployment": {"model": "t1", "local_prefill_rows": 0},
        "engine": {"n_blocks": 32, "n_slots": 2},
        "store": {"arena_bytes": 16 << 20, "ssd_bytes": 32 << 20, "segment_bytes": 8 << 20},
        "router": {"port": port},
    }
    path.write_text(yaml.safe_dump(values))
    return path


@pytest.mark.timeout(900)
async def test_roles_start_and_end_as_plain_processes(
    run: RunDir, llm: LLM, ids: Callable[[str, int], list[int]], until: Callable[..., None]
) -> None:
    config = write(run, 0)
    environment = {**os.environ, "HEADRACE_HOME": str(run.home), "OMP_NUM_THREADS": "1"}
    processes: dict[str, subprocess.Popen[bytes]] = {}
    with ExitStack() as stack:
        for kind, name in ROLES:
            command = [HEADRACE, "role", kind, "--config", str(config), "--name", name]
            processes[name] = subprocess.Popen(command, env=environment, start_new_session=True)
            stack.callback(processes[name].kill)
        members = await all_members(run, config, processes)
        url = members["router-0"].address.replace("tcp://", "http://")
        api = HttpApi(url, run.api_key("local"))
        until(lambda: api.ready_replicas() == (1, 1), PATIENCE_S, "not reached")
        for name, process in processes.items():
            assert members[name].pid == process.pid
            assert "_raylet" not in Path(f"/proc/{process.pid}/maps").read_text()
        router = processes["router-0"].pid
        assert "libtorch" not in Path(f"/proc/{router}/maps").read_text()

        prompt = ids("plain", 500)
        answer = httpx.post(
            f"{url}/v1/completions",
            headers={"Authorization": f"Bearer {run.api_key('local')}"},
            json={"model": "t1", "prompt": prompt, "max_tokens": 4, "temperature": 0},
            timeout=PATIENCE_S,
            trust_env=False,
        ).json()
        assert answer["choices"][0]["text"] == llm.generate([prompt], max_tokens=4)[0].text
        record = json.loads(run.records_file.read_text())
        assert (record["prefill"], record["prefill_rows"], record["decode"]) == ("p", 384, "d")

        for name in ("router-0", "d", "p", "store-0"):
            processes[name].send_signal(signal.SIGTERM)
            assert processes[name].wait(PATIENCE_S) == 0, name


async def all_members(
    run: RunDir, config: Path, processes: dict[str, subprocess.Popen[bytes]]
) -> dict[str, Member]:
    """The records of these processes, when all are ready; fails when one of them ends."""
    board = MemberBoard.of(role_settings(load_config(config), run, Role.SUPERVISOR, "test"))
    try:
        async with asyncio.timeout(PATIENCE_S):
            while True:
                ended = [name for name, process in processes.items() if process.poll() is not None]
                assert not ended, ended
                found = {m.name: m for m in await board.members() if m.state is ReplicaState.READY}
                if found.keys() >= processes.keys():
                    return found
                await asyncio.sleep(0.1)
    finally:
        await board.close()


def test_up_refuses_a_port_in_use_before_it_starts_anything(short_temp: Path) -> None:
    run = RunDir(short_temp, "plain")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = subprocess.run(
            [HEADRACE, "up", str(write(run, port))],
            env={**os.environ, "HEADRACE_HOME": str(short_temp)},
            capture_output=True,
            text=True,
        )
    assert done.returncode == 1
    assert f"router.port {port} on 127.0.0.1 cannot be used" in done.stderr
    assert f"held by process {os.getpid()} (" in done.stderr
    assert "--port N" in done.stderr
    assert done.stderr.count("cannot be used") == 1
    assert "Valkey" not in done.stderr and "Ray" not in done.stderr
    assert not run.path.exists() and not run.short_dir.exists()


def test_a_refused_start_keeps_the_folder_of_earlier_runs(short_temp: Path) -> None:
    run = RunDir(short_temp, "plain")
    run.create()
    key = run.api_key("local")
    path = write(run, 0)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = subprocess.run(
            [HEADRACE, "up", "--port", str(port), str(path)],
            env={**os.environ, "HEADRACE_HOME": str(short_temp)},
            capture_output=True,
            text=True,
        )
    assert done.returncode == 1
    assert done.stderr.count(f"router.port {port} on 127.0.0.1 cannot be used") == 1
    state = run.read_state()
    assert state is not None and state.phase == "failed"
    assert state.error in done.stderr.replace("\n", " ")
    assert run.api_key("local") == key


@pytest.mark.timeout(900)
@pytest.mark.parametrize("known", [False, True])
def test_a_failed_start_takes_back_the_disk_space_that_it_took(
    known: bool, short_temp: Path
) -> None:
    """The store makes its segments, then finds the port of its metrics taken."""
    run = RunDir(short_temp, "plain")
    mark = run.store_directory / "mark"
    if known:  # a store of an earlier run
        run.create()
        mark.write_text("")
    path = write(run, 0)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        values = yaml.safe_load(path.read_text())
        values["store"]["metrics_port"] = port = taken.getsockname()[1]
        values |= {"processes": "one", "pools": {"decode": 1}}
        path.write_text(yaml.safe_dump(values))
        done = subprocess.run(
            [HEADRACE, "up", str(path)],
            env={**os.environ, "HEADRACE_HOME": str(short_temp), "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
        )
    assert done.returncode == 1
    assert f"metrics_port: port {port} of 127.0.0.1 cannot be had" in done.stderr
    state = run.read_state()
    assert state is not None and state.phase == "failed" and run.logs.exists()
    assert mark.exists() == known
    made = sum(file.stat().st_size for file in run.store_directory.glob("segment-*"))
    assert made == (32 << 20 if known else 0)  # so the segments were made in both cases
    assert run.store_directory.exists() == known


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("pools: {decode: 0}", "pools: decode must be between 1 and 64, got 0"),
        ("router: {port: -1}", "router: port must lie between 0 and 65535, got -1"),
        ("router: {host: no.such.host.invalid}", "router.host 'no.such.host.invalid' does not res"),
        ("pools: {decode: 1", "is no valid YAML in line 2"),
    ],
)
def test_up_refuses_a_configuration_with_key_and_bound(
    text: str, reason: str, short_temp: Path
) -> None:
    path = short_temp / "bad.yaml"
    path.write_text(f"{text}\n")
    done = subprocess.run(
        [HEADRACE, "up", str(path)],
        env={**os.environ, "HEADRACE_HOME": str(short_temp)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    assert done.stderr.count(reason) == 1
    assert sorted(short_temp.iterdir()) == [path]


def test_a_home_that_is_a_file_is_named(short_temp: Path) -> None:
    home = short_temp / "file"
    home.write_text("")
    path = write(RunDir(short_temp, "plain"), 0)
    done = subprocess.run(
        [HEADRACE, "up", str(path)],
        env={**os.environ, "HEADRACE_HOME": str(home)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    assert f"cannot make the folder {home}" in done.stderr.replace("\n", "")
    assert "Traceback" not in done.stderr and home.read_text() == ""


@pytest.mark.timeout(900)
def test_of_two_launches_one_wins_and_the_other_touches_nothing(short_temp: Path) -> None:
    run = RunDir(short_temp, "plain")
    path = write(run, 0)
    path.write_text(path.read_text() + "processes: one\npools: {decode: 1}\n")
    environment = {**os.environ, "HEADRACE_HOME": str(short_temp), "OMP_NUM_THREADS": "1"}
    both = [
        subprocess.Popen(
            [HEADRACE, "up", str(path)],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for _ in range(2)
    ]
    try:
        said = [process.communicate(timeout=PATIENCE_S) for process in both]
        assert sorted(process.returncode for process in both) == [0, 1]
        refused = next(said[i][1] for i in range(2) if both[i].returncode)
        words = " ".join(refused.split())
        assert "is led by another process" in words or "is already starting" in words, refused
        state = run.read_state()
        assert state is not None and state.phase == "ready"
        assert state.pid in {member.pid for member in run_members(state)}
        assert HttpApi(state.url, run.api_key("local")).ready()
    finally:
        subprocess.run([HEADRACE, "down", "--name", "plain"], env=environment, timeout=PATIENCE_S)
    ended = run.read_state()
    assert ended is not None and ended.phase == "stopped" and run_members(ended) == []


def test_a_launch_behind_the_lock_leaves_every_file_as_it_is(
    short_temp: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HEADRACE_HOME", str(short_temp))
    run = RunDir(short_temp, "plain")
    run.create()
    (run.short_dir / "socket").write_text("of the other")
    run.state_file.write_text("{}")  # no state of a living leader: the lock alone tells
    lock = lock_run(run)
    assert lock is not None
    launch = Launch(write(run, 0))
    before = sorted(run.path.iterdir())
    with pytest.raises(LaunchError, match="plain is led by another process, or already starting"):
        launch.start(lambda text: None)
    launch.abandon(lambda text: None)
    os.close(lock)
    assert sorted(run.path.iterdir()) == before
    assert run.state_file.read_text() == "{}"
    assert (run.short_dir / "socket").read_text() == "of the other"


def test_ending_a_run_takes_nothing_from_the_one_that_follows(short_temp: Path) -> None:
    run = RunDir(short_temp, "plain")
    run.create()
    (run.short_dir / "socket").write_text("of the next")
    sleeper = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    with sleeper:
        process = read_process(sleeper.pid)
        assert process is not None
        gone = RunState(
            **{f.name: "x" for f in fields(RunState) if f.name != "phase"},
            phase=Phase.READY,
        )
        gone = replace(gone, pid=sleeper.pid, sid=sleeper.pid, started_ticks=1)  # an id used anew
        run.write_state(gone)
        lock = lock_run(run)
        assert lock is not None
        assert end_cluster(run, lambda text: None) == 0
        assert run.read_state() == gone and (run.short_dir / "socket").exists()
        os.close(lock)
        assert end_cluster(run, lambda text: None) == 0  # nobody leads: now it is cleared away
        assert not run.short_dir.exists()
        assert (run.read_state() or gone).phase is Phase.STOPPED
        assert sleeper.poll() is None
        sleeper.communicate(b"\n")


def _take_interrupts() -> None:
    """A suite in the background of a shell inherits an ignored SIGINT, and hands it on."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@pytest.mark.timeout(900)
def test_in_the_foreground_ctrl_c_ends_everything(short_temp: Path) -> None:
    run = RunDir(short_temp, "plain")
    path = write(run, 0)
    path.write_text(path.read_text() + "processes: one\npools: {decode: 1}\n")
    process = subprocess.Popen(
        [HEADRACE, "up", "--foreground", str(path)],
        env={**os.environ, "HEADRACE_HOME": str(short_temp), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=_take_interrupts,
    )
    with process:
        assert process.stdout is not None
        out = ""
        while "logs in" not in out:  # the last line of the welcome
            out += (line := process.stdout.readline())
            assert line, "it ended before it was ready"
        state = run.read_state()
        assert state is not None
        members = run_members(state)
        assert {member.name for member in members} >= {"valkey-server"}
        assert process.pid not in {member.pid for member in members}
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0
    assert f"at {state.url}" in out and "curl -N" in out and run.api_key("local") in out
    assert "stopped; no process is left" in err
    assert run_members(state) == []


@pytest.mark.timeout(900)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_start_that_is_interrupted_leaves_nothing_running(
    short_temp: Path, number: signal.Signals
) -> None:
    """In the background too: the leader is in a session of its own and would go on starting."""
    run = RunDir(short_temp, "plain")
    path = write(run, 0)
    path.write_text(path.read_text() + "processes: one\npools: {decode: 1}\n")
    process = subprocess.Popen(
        [HEADRACE, "up", str(path)],
        env={**os.environ, "HEADRACE_HOME": str(short_temp), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=_take_interrupts,
    )
    with process:
        assert process.stderr is not None
        said = ""
        while "starting the embedded Valkey" not in said:
            said += (line := process.stderr.readline())
            assert line, said
        state = run.read_state()
        assert state is not None and state.phase == Phase.STARTING
        assert state.pid in {member.pid for member in run_members(state)}
        process.send_signal(number)
        _, said = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 130
    assert "stopped; no process is left" in said
    assert run_members(state) == []
    ended = run.read_state()
    assert ended is not None and ended.phase == Phase.STOPPED
