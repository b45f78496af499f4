"""`headrace store` on the store of a cluster that runs: every command, as people and programs see
it. The store is a process of a real run directory; there is no model and no Ray."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis
from typer.testing import CliRunner

from headrace.cluster.cli import app
from headrace.cluster.rundir import Phase, RunDir, RunState
from headrace.cluster.session import machine_boot_id, read_process
from headrace.core.ids import Digest
from headrace.kvstore import Kind, StoreClient

ROOT = Path(__file__).parents[2]
NAMESPACE = bytes(range(32))
DIGESTS = [Digest(hashlib.sha256(b"%d" % n).digest()) for n in range(12)]
A, B = DIGESTS[:4], DIGESTS[4:7]


@pytest.fixture(scope="module")
def running(tmp_path_factory) -> Iterator[RunDir]:
    """A run `r` whose store serves two chains: of four blocks in domain `local`, of three in
    another."""
    home = tmp_path_factory.mktemp("home")
    run = RunDir(home, "r")
    run.create()
    config = (ROOT / "configs/cluster/one-process.yaml").read_text()
    run.config_file.write_text(config.replace("cluster: one-process", "cluster: r"))
    script = str(Path(__file__).with_name("store_of_run.py"))
    process = subprocess.Popen(
        [sys.executable, "-P", script, str(home), "r"],
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    before = os.environ.get("HEADRACE_HOME")
    os.environ["HEADRACE_HOME"] = str(home)
    try:
        assert process.stdout is not None and process.stdout.readline() == b"ready\n"
        known = read_process(process.pid)
        assert known is not None and known.sid == process.pid
        mark = (process.pid, process.pid, known.started_ticks, machine_boot_id())
        run.write_state(RunState("r", Phase.READY, "", "", *mark, "one", "demo", "", "test"))
        asyncio.run(_fill(run))
        yield run
    finally:
        if before is None:
            del os.environ["HEADRACE_HOME"]
        else:
            os.environ["HEADRACE_HOME"] = before
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
        assert process.stdout is not None
        process.stdout.close()
        shutil.rmtree(run.short_dir, ignore_errors=True)


async def _fill(run: RunDir) -> None:
    client = StoreClient(run.store_address, run.cluster_token(), NAMESPACE)
    assert await client.connect(10.0)
    for chain, domain in ((A, "local"), (B, "another")):
        items = [(digest, digest[:1] * 3000) for digest in chain]
        assert None not in await client.put(Kind.KV, items, domain=domain)
    async with asyncio.timeout(20):
        while (stat := await client.stat()) is None or stat.pending or stat.index_unlisted:
            await asyncio.sleep(0.01)
    assert stat.ssd_objects == 7 and stat.index == "ok"
    await client.close()


def run_(*words: object, status: int = 0):
    result = CliRunner().invoke(app, ["store", *map(str, words)])
    assert result.exit_code == status, result.output
    return result


def said(*words: object, status: int = 0) -> str:
    return run_(*words, status=status).output


def values(*words: object, status: int = 0) -> dict:
    """Standard output is one JSON value and nothing else: progress goes elsewhere."""
    return json.loads(run_(*words, "--json", status=status).stdout)


def records(run: RunDir) -> dict[bytes, bytes]:
    client = redis.Redis(unix_socket_path=str(run.valkey_socket))
    found = {key: client.get(key) for key in client.keys("kv:*") if b"store" not in key}
    client.close()
    return found


def test_stat_and_ls(running):
    found = values("stat")
    assert found["store"]["ssd_objects"] == 7 and found["chains"] == 2
    rows = {(row["kind"], row["domain"]): row for row in found["sums"]}
    assert rows["kv", "local"]["payload_bytes"] == 12_000  # a domain of the configuration, by name
    assert rows["kv", "local"]["host_objects"] == rows["kv", "local"]["ssd_objects"] == 4
    assert found["pins"]["pins"] == [] and found["pins"]["quota_bytes"] == (2 << 20) // 4
    assert "12.0 kB" in said("stat")
    listed = values("ls", "--name", "r")
    assert {(c["tip"], c["tokens"], c["whole"]) for c in listed["chains"]} == {
        (A[-1].hex(), 512, True),
        (B[-1].hex(), 384, True),
    }
    assert (
        values("ls", "--limit", 1)["total"] == 2 and len(values("ls", "--limit", 1)["chains"]) == 1
    )


def test_verify_and_scrub(running):
    for what in ("verify", "scrub"):
        found = values(what)
        assert (found["read"], found["objects"], found["damaged"]) == (7, 7, False)
        assert found["payload_bytes"] == 21_000 and found["flaws"] == {}
    assert "7 objects read, 7 sound (21.0 kB)" in said("verify")


def test_warm_pin_and_unpin(running):
    tip = A[-1].hex()[:12]
    got = values("warm", tip, "--pin", "menu", "--ttl", "90m")
    assert (got["blocks"], got["blocks_in_memory"], got["held_bytes"]) == (4, 4, 12_000)
    pins = values("stat")["pins"]
    (pin,) = pins["pins"]
    assert (pin["name"], pin["tip"], pins["held_bytes"]) == ("menu", A[-1].hex(), 12_000)
    left_s = pin["expires_at_s"] - os.stat(running.store_directory / "pins.json").st_mtime
    assert 5399 <= left_s <= 5401
    assert "menu" in said("stat")
    assert values("warm", "--unpin", "menu") == {"ended": True}
    assert values("warm", "--unpin", "menu") == {"ended": False}
    assert values("stat")["pins"]["pins"] == []
    assert "none of the whole chains" in said("warm", "00", status=2)
    assert "--ttl must be a number" in said("warm", tip, "--pin", "x", "--ttl", "week", status=2)


def test_rebuild_index(running):
    before = records(running)
    assert len(before) == 7
    client = redis.Redis(unix_socket_path=str(running.valkey_socket))
    client.delete(*before)
    client.close()
    assert values("rebuild-index") == {"objects": 7, "waiting": 0}
    assert records(running) == before  # all of it is there when the command ends
    assert "the records of 7 objects were written anew" in said("rebuild-index")


def test_gc_leaves_what_is_young_and_sweeps_the_index(running):
    found = values("gc", "--domain", "another", "--dry-run")
    assert found["dry_run"] and found["flaws"] == {}  # nothing is older than a minute
    found = values("gc", "--index")
    assert found["index"] == {"stores": 0, "records": 0} and found["objects"] == 7
    assert values("ls")["total"] == 2


def test_export_and_import(running, tmp_path):
    file = tmp_path / "a.hrpx"
    sent = values("export", file, "--tip", A[-1].hex()[:12])
    assert (sent["chains"], sent["objects"], sent["payload_bytes"]) == (1, 4, 12_000)
    nothing = {"written": 0, "no_room": 0, "unsaved": 0, "payload_bytes": 0}
    assert values("import", file) == {"known": 4, **nothing}
    assert "0 objects written, 4 were there" in said("import", file)
    data = bytearray(file.read_bytes())
    data[9000] ^= 1
    file.write_bytes(data)
    assert "does not match its checksum" in said("import", file, status=2).replace("\n", " ")


def test_a_served_directory_is_refused_by_its_path(running):
    for what in ("verify", "gc", "stat"):
        words = said(what, running.store_directory, status=2).replace("\n", " ")
        assert "is served by a running store" in words and "leave the directory out" in words
