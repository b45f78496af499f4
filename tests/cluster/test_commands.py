"""The `headrace` command where no cluster runs: what it refuses, what it says, what it leaves."""

from __future__ import annotations

import base64
import io
import itertools
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from headrace_tests import module
from rich.console import Console

from headrace.cluster.chat import USAGE, attached_path, converse
from headrace.cluster.cli import Doing
from headrace.cluster.rundir import Phase, RunDir, RunState
from headrace.cluster.session import Process, machine_boot_id
from headrace.cluster.status import Facts, collect, notes_of, store_table, table
from headrace.core.errors import ConfigError
from headrace.core.metrics import Metric

answering = module("tests/beside/answering.py")
HEADRACE = Path(sys.executable).parent / "headrace"


def run(*arguments: str, home: Path | None = None) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, **({"HEADRACE_HOME": str(home)} if home else {})}
    return subprocess.run(
        [HEADRACE, *arguments], capture_output=True, text=True, check=False, env=environment
    )


def test_layout_of_the_published_model() -> None:
    done = run("layout", "flash", "--json")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["bytes_per_token"] == 890
    assert report["block_bytes"] == 113_920
    assert report["window_record_bytes"] == 1_341_120


def test_help_and_refusals_come_from_the_inner_command() -> None:
    shown = run("model", "inspect", "--help")
    assert shown.returncode == 0
    assert "headrace model inspect" in shown.stdout
    refused = run("layout", "no-such-model")
    assert refused.returncode != 0
    assert "no-such-model" in refused.stderr + refused.stdout


def state(phase: Phase, *, error: str = "", url: str = "") -> RunState:
    """A state whose leader is long gone."""
    return RunState("local", phase, error, error, 0, 0, 0, "", "one", "t2", url, "test")


@pytest.fixture
def failed_run(tmp_path: Path) -> RunDir:
    run_dir = RunDir(tmp_path, "local")
    run_dir.create()
    run_dir.config_file.write_text("cluster: local")
    run_dir.write_state(state(Phase.FAILED, error="no [room] for Valkey"))
    return run_dir


def test_status_says_where_it_looked(tmp_path: Path, failed_run: RunDir) -> None:
    empty = tmp_path / "empty"
    done = run("status", home=empty)
    assert done.returncode == 1
    assert f"no cluster runs under {empty};" in done.stderr
    assert "local failed" in run("status", home=failed_run.home).stderr


def test_status_of_a_failed_start_shows_its_reason_and_no_address(failed_run: RunDir) -> None:
    shown = Console(file=io.StringIO(), width=200, record=True)
    shown.print(table(collect(failed_run)))
    head = shown.export_text().splitlines()[0].rstrip()
    expected = "local: failed: no [room] for Valkey, model t2, 0 processes, build test"
    assert head == expected
    # Nothing runs, and what the configuration wants is named all the same.
    wanted = "vision 0 of 0, prefill 0 of 1, decode 0 of 2, router 0 of 1"
    assert pool_line(collect(failed_run)) == f"pools: {wanted} ready"


def test_counts_of_replicas_are_integers(failed_run: RunDir, leader: Process) -> None:
    names = ("requests", "parked", "free_blocks", "backlog_ms")
    metrics = (Metric.REPLICA_REQUESTS, Metric.REPLICA_PARKED)
    metrics += (Metric.REPLICA_FREE_BLOCKS, Metric.BACKLOG_MS)
    lines = [f'{m}{{replica="decode-0"}} 1024.0\n' for m in metrics]

    class Handler(answering.Answers):
        def do_GET(self) -> None:
            self.answer("".join(lines), "text/plain")

    with answering.serving(Handler) as url:
        running = replace(
            state(Phase.READY, url=url),
            pid=leader.pid,
            sid=leader.sid,
            started_ticks=leader.started_ticks,
            boot_id=machine_boot_id(),
        )
        failed_run.write_state(running)
        roles = {role["name"]: role for role in collect(failed_run)["roles"]}
    shown = json.dumps([roles["decode-0"][name] for name in names])
    assert shown == "[1024, 1024, 1024, 1024.0]"  # a time is none
    assert roles["decode-1"]["requests"] is None


def pool_line(view: dict[str, Any]) -> str:
    """The line below the table of roles."""
    shown = Console(file=io.StringIO(), width=200, record=True)
    shown.print(table(view))
    return shown.export_text().splitlines()[-1].rstrip()


def test_status_counts_the_replicas_that_are_ready_and_alive(failed_run: RunDir) -> None:
    view = collect(failed_run)
    for role in view["roles"]:
        role.update(state="ready", alive=role["name"] != "decode-1")
    assert [role["name"] for role in view["roles"] if role["role"] == "decode"] == [
        "decode-0",
        "decode-1",
    ]
    assert "decode 1 of 2, router 1 of 1 ready" in pool_line(view)


def test_status_names_the_pool_of_which_nobody_serves_and_who_is_gone(failed_run: RunDir) -> None:
    failed_run.write_state(state(Phase.READY))
    view = collect(failed_run) | {"phase": "ready", "ready": True}
    for role in view["roles"]:
        role.update(state="ready", pid=1, alive=role["name"] not in ("decode-1", "prefill-0"))
    shown = Console(file=io.StringIO(), width=200, record=True)
    shown.print(table(view))
    head, *rows = shown.export_text().splitlines()
    assert head.startswith("local: ready without prefill, ")  # one decode replica is left
    states = {
        cells[1].strip(): cells[2].strip() for row in rows if len(cells := row.split("│")) > 2
    }
    assert states["decode-0"] == states["router-0"] == "ready"
    assert states["decode-1"] == states["prefill-0"] == "gone"


@pytest.mark.parametrize(
    ("ready", "leader", "restarts", "said"),
    [
        (True, True, True, None),
        (False, True, True, None),
        (True, True, False, "Ray's head is gone: serving goes on, but dead replicas are not"),
        (False, True, False, "Ray's head is gone, no request is served and no dead replica is"),
        (True, False, True, "the leader is gone: requests are served until a part dies;"),
        (True, False, False, "the leader is gone: requests are served until a part dies;"),
        (False, False, True, "the leader is gone and no request is served;"),
        (False, False, False, "the leader is gone and no request is served;"),
    ],
)
def test_notes_say_one_thing_and_only_what_is_so(
    ready: bool, leader: bool, restarts: bool, said: str | None
) -> None:
    facts = Facts("local", stale=False, ready=ready, leader=leader, restarts=restarts)
    notes = notes_of(facts)
    assert len(notes) == (said is not None)
    if said is not None:
        assert notes[0].startswith(said) and "`headrace down --name local`" in notes[0]
    redis, *others = notes_of(replace(facts, stale=True))
    assert redis.startswith("Redis does not answer") and others == notes


def test_the_line_above_the_tiers_is_whole_though_the_table_is_narrower() -> None:
    tiers = ("arena_resident", "arena_bytes", "arena_free", "arena_slots", "pending")
    disk = ("ssd_objects", "ssd_bytes", "ssd_segments", "ssd_segments_free")
    held = {"blocks": 14329, "windows": 1133, "pictures": 13, "states": 0, "index": "ok"}
    shown = Console(file=io.StringIO(), width=80, record=True)
    shown.print(store_table(dict.fromkeys((*tiers, *disk), 1) | held))
    line, top, *_ = shown.export_text().splitlines()
    assert line == ("store: 14329 blocks, 1133 window records, 13 pictures, 0 states; index ok")
    assert top.startswith("┏") and len(top) < len(line)


def test_a_narrow_window_gets_every_role_state_and_process_whole(failed_run: RunDir) -> None:
    view = collect(failed_run)
    view["url"], view["processes"] = "http://127.0.0.1:8000", 9
    for n, role in enumerate(view["roles"]):
        address = f"tcp://127.0.0.1:4000{n}"
        role.update(state="draining", pid=4_194_300 + n, alive=True, address=address, lives=12)
        role.update(requests=1000.0, backlog_ms=12345.0, free_blocks=123456.0, parked=10.0)
    for width, told in ((80, False), (120, True)):
        shown = Console(file=io.StringIO(), width=width)
        with shown.capture() as captured:
            shown.print(table(view, width))
        text = captured.get()
        assert max(map(len, text.splitlines())) <= width
        assert "…" not in text and ("tcp:" in text) == told
        cells = [[cell.strip() for cell in line.split("│")] for line in text.splitlines()]
        for role in view["roles"]:
            assert any(
                line[1:5] == [role["name"], "draining", str(role["pid"]), "12"] for line in cells
            ), role


@pytest.mark.parametrize("command", ["up", "status", "chat", "role"])
def test_help_fills_the_window(command: str) -> None:
    """No line of a paragraph ends where its source line did, unless the next word is too long."""
    environment = {**os.environ, "COLUMNS": "80", "TERMINAL_WIDTH": "80", "NO_COLOR": "1"}
    done = subprocess.run(
        [HEADRACE, command, "--help"], capture_output=True, text=True, check=True, env=environment
    )
    lines = [line.strip() for line in done.stdout.split("╭")[0].splitlines()]
    prose = lines[next(i for i, line in enumerate(lines) if line.startswith("Usage")) + 1 :]
    pairs = [(a, b) for a, b in itertools.pairwise(prose) if a and b]
    assert any(prose)
    for line, after in pairs:
        assert len(line) + 1 + len(after.split()[0]) > 76, line


@pytest.mark.parametrize(
    ("deployment", "reason"),
    [
        ("{model: no-such}", "deployment.model must be one of demo, flash, t1, t2, toy, v4-flash"),
        ("{model: mine, checkpoint: /nowhere}", "deployment.checkpoint must be a folder"),
        ("{model: /nowhere.json}", "deployment.model must be a file"),
    ],
)
def test_weights_that_are_not_there_are_refused_before_a_leader(
    deployment: str, reason: str, tmp_path: Path
) -> None:
    config, home = tmp_path / "c.yaml", tmp_path / "home"
    config.write_text(f"deployment: {deployment}")
    done = run("up", str(config), home=home)
    assert done.returncode == 1 and reason in done.stderr
    assert "checking" not in done.stderr and not home.exists()


def test_ending_nothing_is_no_reason_to_start(tmp_path: Path) -> None:
    done = run("down", home=tmp_path)
    assert done.returncode == 1
    assert "there is nothing to end" in done.stderr and "headrace up" not in done.stderr


def test_a_role_without_redis_is_refused_and_leaves_nothing(root: Path, tmp_path: Path) -> None:
    config = str(root / "configs" / "cluster" / "local.yaml")
    home = tmp_path / "home"
    done = run("role", "decode", "--config", config, "--name", "decode-0", home=home)
    assert done.returncode == 1
    assert "start it with `headrace up`, or set redis.url" in done.stderr
    assert not home.exists()

    stale = RunDir(home, "local")
    stale.create()
    with socket.socket(socket.AF_UNIX) as killed:  # closed, but its file stays
        killed.bind(str(stale.valkey_socket))
    assert stale.valkey_socket.exists()
    done = run("role", "decode", "--config", config, "--name", "decode-0", home=home)
    assert (done.returncode, "set redis.url" in done.stderr) == (1, True)


def test_a_role_that_there_is_not(root: Path) -> None:
    config = str(root / "configs" / "cluster" / "local.yaml")
    done = run("role", "supervisor", "--config", config, "--name", "a")
    assert done.returncode == 1
    assert "one of store, vision, prefill, decode, router, got 'supervisor'" in done.stderr


@pytest.mark.parametrize("line", ["/x", "/image", "/imagecat.png", "/ image a.png", "//"])
def test_a_chat_line_that_is_no_command(line: str) -> None:
    with pytest.raises(ConfigError) as refused:
        attached_path(line)
    assert USAGE in refused.value.message


def test_chat_lines() -> None:
    assert attached_path("hello /image a.png") is None
    assert attached_path("/image  my cat.png") == Path("my cat.png")


@pytest.fixture
def server() -> Iterator[tuple[str, list[Any]]]:
    """A server that refuses every request and keeps its body."""
    bodies: list[Any] = []

    class Handler(answering.Answers):
        def do_POST(self) -> None:
            bodies.append(json.loads(self.asked()))
            self.send_error(503)

    with answering.serving(Handler) as url:
        yield url, bodies


def test_a_chat_with_nobody_says_so(failed_run: RunDir) -> None:
    with socket.socket() as held:  # bound, so that nobody else gets the port, and not listening
        held.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{held.getsockname()[1]}"
        failed_run.write_state(state(Phase.READY, url=url))
        done = run("chat", "--name", "local", home=failed_run.home)
        assert (done.returncode, done.stdout) == (1, "")
        assert f"no answer from {url}: Connection refused" in " ".join(done.stderr.split())


def test_chat_attaches_a_picture_to_one_message(
    server: tuple[str, list[Any]],
    failed_run: RunDir,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    url, bodies = server
    failed_run.write_state(state(Phase.READY, url=url))
    (tmp_path / "[cat].png").write_bytes(b"not looked at here")
    lines = f"/image {tmp_path}/[cat].png\nlook\nand now\n\n"
    monkeypatch.setattr(sys, "stdin", io.StringIO(lines))
    out = Console(file=io.StringIO(), width=200, record=True)
    converse(failed_run, out, system="", max_tokens=4)
    assert "[cat].png goes with the next message" in out.export_text()
    first, second = (body["messages"] for body in bodies)
    data = base64.b64encode(b"not looked at here").decode()
    image = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}}
    assert first == [{"role": "user", "content": [image, {"type": "text", "text": "look"}]}]
    assert second == [{"role": "user", "content": "and now"}]  # the refused turn is forgotten


def test_chat_shows_text_as_it_came_and_what_was_found(
    failed_run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = "I :smile: [bold]at[/] :cat:"
    chunk = {"choices": [{"delta": {"content": said}}]}
    usage = {"prompt_tokens": 145, "prompt_tokens_details": {"cached_tokens": 128}}
    last = {"choices": [], "usage": usage | {"completion_tokens": 8}}
    lines = [f"data: {json.dumps(one)}\n\n" for one in (chunk, last)] + ["data: [DONE]\n\n"]

    class Handler(answering.Answers):
        def do_POST(self) -> None:
            self.asked()
            self.answer("".join(lines), "text/event-stream")

    monkeypatch.setattr(sys, "stdin", io.StringIO("hello\n\n"))
    out = Console(file=io.StringIO(), width=200, record=True)
    with answering.serving(Handler) as url:
        failed_run.write_state(state(Phase.READY, url=url))
        converse(failed_run, out, system="", max_tokens=4)
    shown = out.export_text()
    assert said in shown
    assert "145 tokens in (128 cached), 8 out" in shown


def test_chat_sends_messages_and_no_mistyped_command(
    server: tuple[str, list[Any]], failed_run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    url, bodies = server
    failed_run.write_state(state(Phase.READY, url=url))
    lines = "/help\n/image\n/image /no/cat.png\nhello\n\nnever read\n"
    monkeypatch.setattr(sys, "stdin", io.StringIO(lines))
    out = Console(file=io.StringIO(), width=200, record=True)
    converse(failed_run, out, system="", max_tokens=4, temperature=0.5)
    assert [body["temperature"] for body in bodies] == [0.5]
    shown = out.export_text()
    assert [body["messages"] for body in bodies] == [[{"role": "user", "content": "hello"}]]
    assert shown.splitlines()[:2] == [f"model t2 of cluster local at {url}", USAGE]
    assert shown.count(USAGE) == 3 and "'/help'" not in shown  # at the begin, for /help and /image
    assert "/image needs the path of a picture" in shown
    assert "cannot read /no/cat.png: No such file or directory" in shown


def test_a_start_says_what_it_does_and_for_how_long() -> None:
    now = [100.0]
    doing = Doing(lambda: now[0])
    now[0], doing.text = 107.4, "starting Ray [2 of 3]"
    assert str(doing.__rich__()) == "  7 s  starting Ray [2 of 3]"
