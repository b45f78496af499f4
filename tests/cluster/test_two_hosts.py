"""Stores of two hosts of one cluster, by configuration alone: real processes, one Redis."""

from __future__ import annotations

import asyncio
import hashlib
import os
import random
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml

from headrace.cluster.config import read_config
from headrace.cluster.rundir import RunDir, SlotSizes
from headrace.core.ids import Digest
from headrace.kvstore import EmbeddedRedis, IndexReader, Kind, StoreClient, embedded_valkey

HEADRACE = str(Path(sys.executable).parent / "headrace")
NAMESPACE = hashlib.sha256(b"two hosts").digest()
SIZES = SlotSizes(block_bytes=3000, window_bytes=5000)
STORE = {"arena_bytes": 4 << 20, "ssd_bytes": 8 << 20, "segment_bytes": 2 << 20}
PATIENT = {"index_deadline_s": 3.0, "recompute_tokens_per_s": 50.0}  # for a busy machine
PATIENCE_S = 120.0


@pytest.fixture
def valkey(short_temp: Path) -> Iterator[EmbeddedRedis]:
    folder = short_temp / "redis"
    folder.mkdir()
    server = embedded_valkey(str(folder))
    yield server
    server.stop()


@pytest.fixture
def host(short_temp: Path, valkey: EmbeddedRedis) -> Iterator[Callable[..., RunDir]]:
    """`host(name, **store)`: a store process `store-NAME` with a home folder of its own, as on
    another machine; the token is the one thing that is carried over."""
    started: list[subprocess.Popen[bytes]] = []
    homes: list[RunDir] = []

    def start(name: str, **store: object) -> RunDir:
        values = {
            "cluster": "two",
            "redis": {"url": valkey.url},
            "deployment": {"model": "t1"},
            "store": {**STORE, **PATIENT, **store},
        }
        config = short_temp / f"{name}.yaml"
        config.write_text(yaml.safe_dump(values))
        run = RunDir(short_temp / name, "two")
        run.create()
        run.write_sizes("t1", SIZES)  # what the leader of `up` keeps: no torch here
        if homes:
            shutil.copy(homes[0].path / "token", run.path / "token")
        run.cluster_token()
        homes.append(run)
        started.append(
            subprocess.Popen(
                [HEADRACE, "role", "store", "--config", str(config), "--name", f"store-{name}"],
                env={**os.environ, "HEADRACE_HOME": str(run.home), "OMP_NUM_THREADS": "1"},
                start_new_session=True,
            )
        )
        return run

    yield start
    for process in started:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
    for process in started:
        assert process.wait(PATIENCE_S) == 0


def digest(number: int) -> Digest:
    return Digest(hashlib.sha256(b"%d" % number).digest())


def payload(number: int) -> bytes:
    return random.Random(number).randbytes(SIZES.block_bytes)


async def attached(run: RunDir) -> StoreClient:
    client = StoreClient(run.store_address, run.cluster_token(), NAMESPACE)
    assert await client.connect(PATIENCE_S)
    return client


async def listed(client: StoreClient) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while True:
            stat = await client.stat()
            if stat and stat.index == "ok" and not (stat.index_unlisted or stat.pending):
                return
            await asyncio.sleep(0.05)


@pytest.mark.fault
@pytest.mark.timeout(600)
async def test_what_one_host_stored_another_opens(
    host: Callable[..., RunDir], valkey: EmbeddedRedis
) -> None:
    here, there = host("a"), host("b")
    a, b = await attached(here), await attached(there)
    numbers = range(20)
    await a.put(Kind.KV, [(digest(n), payload(n)) for n in numbers])
    await listed(a)
    await listed(b)
    places = await b.open_prefix([digest(n) for n in numbers], None)
    assert len(places) == 20
    for number, place in zip(numbers, places, strict=True):
        dest = bytearray(place.payload_bytes)
        assert b.read_into(place, digest(number), dest) and bytes(dest) == payload(number)
    stat = await b.stat()
    assert stat is not None and (stat.peer_fetched, stat.peer_failed) == (20, 0)
    sent = await a.stat()
    assert sent is not None and sent.peer_sent == 20
    reader = IndexReader(valkey.url, deadline_s=3.0)
    hits = await reader.hit_blocks(NAMESPACE, [digest(n) for n in numbers])
    assert hits.blocks == 20
    await reader.close()
    await a.close()
    await b.close()


@pytest.mark.fault
@pytest.mark.timeout(600)
async def test_a_store_that_is_told_not_to_serves_no_other(host: Callable[..., RunDir]) -> None:
    here, there = host("a", peer_listen=""), host("b")
    a, b = await attached(here), await attached(there)
    await a.put(Kind.KV, [(digest(1), payload(1))])
    await listed(a)
    await listed(b)
    assert await b.open_prefix([digest(1)], None) == ()
    stat = await b.stat()
    assert stat is not None and (stat.peer_fetched, stat.peer_failed) == (0, 0)
    await a.close()
    await b.close()


@pytest.mark.parametrize(
    ("text", "listen"),
    [
        ("", ""),
        ("redis: {url: 'redis://r:6379/0'}", "tcp://127.0.0.1:0"),
        ("redis: {url: 'redis-cluster://r:6379,s:6379'}", "tcp://127.0.0.1:0"),
        ("redis: {url: 'redis://r/0'}\nlisten_host: 10.1.2.3", "tcp://10.1.2.3:0"),
        ("redis: {url: 'redis://r/0'}\nlisten_host: '2001:db8::7'", "tcp://[2001:db8::7]:0"),
        ("redis: {url: 'redis://r/0'}\nlisten_host: 0.0.0.0", ""),
        ("redis: {url: 'redis://r/0'}\nstore: {peer_listen: ''}", ""),
        ("redis: {url: 'redis://r/0'}\nstore: {peer_listen: 'tcp://10.9.9.9:7000'}",
         "tcp://10.9.9.9:7000"),
    ],
)  # fmt: skip
def test_where_a_store_serves_others_follows_from_the_configuration(
    text: str, listen: str, tmp_path: Path
) -> None:
    run = RunDir(tmp_path, "local")
    run.create()
    config = read_config(f"deployment: {{model: t1}}\n{text}", "x")
    run.write_sizes("t1", SIZES)
    assert config.store_settings(run).peer_listen == listen
