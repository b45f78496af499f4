"""`headrace store` on a directory: what it prints, and how it ends."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import os
import tempfile
from collections.abc import AsyncIterator
from dataclasses import asdict, fields
from pathlib import Path

import pytest
from typer.testing import CliRunner

from headrace.cluster.cli import app
from headrace.cluster.reading import read_record
from headrace.cluster.store_steps import import_into, namespaces_of, show
from headrace.cluster.store_views import stat_view
from headrace.cluster.stores import Target
from headrace.core.deployment import Deployment
from headrace.core.errors import ConfigError
from headrace.core.ids import Digest
from headrace.core.role import RoleSettings
from headrace.kvstore import Kind, StoreClient, StoreSettings, StoreStat, run_store
from headrace.kvstore.layout import domain_tag
from headrace.kvstore.policy import DomainShare
from headrace.kvstore.workshop.live import LiveStore

DIGESTS = [Digest(hashlib.sha256(b"%d" % n).digest()) for n in range(4)]
SLOT = 4096


@pytest.fixture
def directory(tmp_path, monkeypatch) -> Path:
    """A store's directory with one chain of four blocks; HEADRACE_HOME is empty."""
    monkeypatch.setenv("HEADRACE_HOME", str(tmp_path / "home"))
    (tmp_path / "home").mkdir()
    monkeypatch.setenv("COLUMNS", "160")
    asyncio.run(_fill(tmp_path))
    return tmp_path / "store"


@contextlib.asynccontextmanager
async def serving(home: Path) -> AsyncIterator[str]:
    """A store on `home/store`; its address."""
    address = f"unix://{home}/s"
    role = RoleSettings("store-0", address, "token", "", address, str(home), "test", Deployment())
    settings = StoreSettings(
        directory=str(home / "store"),
        arena_bytes=1 << 20,
        ssd_bytes=1 << 20,
        segment_bytes=256 << 10,
        block_bytes=3000,
        window_bytes=3000,
        group_s=0.01,
    )
    up, halt = asyncio.Event(), asyncio.Event()
    task = asyncio.create_task(run_store(role, settings, ready=lambda member: up.set(), stop=halt))
    await up.wait()
    yield address
    halt.set()
    await task


async def _fill(home: Path) -> None:
    async with serving(home) as address:
        client = StoreClient(address, "token", bytes(range(32)))
        assert await client.connect(10.0)
        items = [(digest, bytes([n]) * 3000) for n, digest in enumerate(DIGESTS)]
        await client.put(Kind.KV, items, domain="gold")
        await client.close()


def run(*words: object, status: int = 0) -> str:
    result = CliRunner().invoke(app, ["store", *map(str, words)])
    assert result.exit_code == status, result.output
    return result.output


def values(*words: object, status: int = 0) -> dict:
    result = CliRunner().invoke(app, ["store", *map(str, words), "--json"])
    assert result.exit_code == status, result.output
    return json.loads(result.stdout)


def test_stat_and_ls_say_what_is_there(directory):
    found = values("stat", directory)
    assert found["segments"] == {
        "files": 4,
        "free": 3,
        "damaged": 0,
        "short": 0,
        "file_bytes": 1 << 20,
    }
    (row,) = found["sums"]
    assert (row["kind"], row["objects"], row["payload_bytes"]) == ("kv", 4, 12_000)
    assert found["chains"] == 1 and found["economics"] is None
    listed = values("ls", directory)
    (chain,) = listed["chains"]
    assert chain["tip"] == DIGESTS[3].hex() and chain["tokens"] == 512 and chain["whole"]
    said = run("stat", directory)
    assert "12.0 kB" in said and "│ block │" in said and "kv" not in said
    listed = run("ls", directory)
    assert DIGESTS[3].hex()[:16] in listed and "┃ whole ┃" in listed and "│ yes   │" in listed
    for output in (said, listed):  # a directory knows no names
        assert domain_tag("gold").hex()[:12] in output
        assert "keeps tags of domains, not names" in output


def account(**values: float | None) -> dict[str, float | None]:
    row_s: dict[str, float | None] = {"row_s": None}
    return dict.fromkeys(("hits", "found_tokens", "saved_rows", "again_rows"), 0) | row_s | values


@pytest.mark.parametrize(
    ("of", "sentence"),
    [
        (
            account(),
            "hits: none in the store yet (what a replica still had itself is not counted)",
        ),
        (
            account(hits=1, found_tokens=128, load_s=0.014),
            "hits: 1 request found 128 tokens in the store; 0 rows not run,"
            " 0.01 s load and verify; what a row costs is known once a prefill replica has run"
            " some, until then nothing counts as saved",
        ),
        (
            account(hits=3, found_tokens=1408, saved_rows=1000, again_rows=24, row_s=0.002)
            | {"saved_s": 2.0, "load_s": 0.375, "replay_s": 0.048, "net_s": 1.577},
            "hits: 3 requests found 1,408 tokens in the store; 1,000 rows not run x 2.00 ms ="
            " 2.00 s saved, less 0.38 s load and verify, 0.05 s for 24 rows run twice: +1.58 s",
        ),
    ],
)
def test_what_is_said_of_hits(of, sentence):
    pins = {"pins": []}
    shown = stat_view({"sums": [], "chains": 0, "pins": pins, "economics": of})
    assert str(shown.renderables[-1]) == sentence


@pytest.mark.parametrize(("lock", "lines"), [("locked", 0), ("off", 0), ("refused", 1)])
def test_memory_that_may_be_swapped_out_is_said_once(lock, lines):
    numbers = {field.name: 1 for field in fields(StoreStat)}
    store = numbers | {"index": "ok", "arena_lock": lock}
    shown = stat_view({"store": store, "sums": [], "chains": 0, "pins": {"pins": []}})
    said = [str(part) for part in shown.renderables if "swapped" in str(part)]
    assert len(said) == lines and all("RLIMIT_MEMLOCK" in line for line in said)


def test_damage_ends_with_1_until_it_is_scrubbed(directory):
    assert values("verify", directory)["objects"] == 4
    assert "4 objects read, 4 sound (12.0 kB)" in run("verify", directory)
    assert "4 objects looked at, 4 stay (12.0 kB)\nnothing to rem" in run("gc", directory)
    path = directory / "segment-000000.seg"
    data = bytearray(path.read_bytes())
    data[4096 + SLOT + 9] ^= 1
    path.write_bytes(data)
    found = values("verify", directory, status=1)
    assert found["flaws"] == {"payload": 1} and (found["read"], found["objects"]) == (4, 3)
    assert found["places"] == [{"segment": 0, "slot": 1, "flaw": "payload", "bytes": 3000}]
    assert "1 do not match their checksum: removed" in run("scrub", directory, status=1)
    assert values("verify", directory)["objects"] == 3
    # what hung on it is garbage now
    assert values("gc", directory, "--dry-run")["flaws"] == {"orphan": 2}
    said = run("gc", directory, "--dry-run")
    assert "2 hang on blocks that are not stored: would go" in said and "nothing" not in said
    assert values("gc", directory)["flaws"] == {"orphan": 2}
    assert values("gc", directory)["flaws"] == {}
    assert values("verify", directory)["objects"] == 1


def test_a_chain_goes_out_and_comes_back(directory, tmp_path):
    file = tmp_path / "chain.hrpx"
    sent = values("export", file, directory, "--tip", DIGESTS[3].hex()[:12])
    assert (sent["objects"], sent["payload_bytes"]) == (4, 12_000)
    assert values("gc", directory, "--domain", "gold")["flaws"] == {"unwanted": 4}
    assert values("ls", directory)["chains"] == []
    assert run("ls", directory) == "no chain is stored\n"
    assert "nothing is stored\n" in run("stat", directory)
    got = values("import", file, directory)
    assert (got["written"], got["known"], got["no_room"]) == (4, 0, 0)
    assert values("verify", directory)["objects"] == 4
    assert values("ls", directory)["chains"][0]["tip"] == DIGESTS[3].hex()


def test_a_namespace_is_named_by_what_ls_shows(directory, tmp_path):
    shown = values("ls", directory)["chains"][0]["namespace"][:16]
    assert shown in run("ls", directory)
    sent = values("export", tmp_path / "f", directory, "--all", "--namespace", shown[:9])
    assert sent["objects"] == 4
    assert values("gc", directory, "--namespace", shown.upper())["flaws"] == {"unwanted": 4}


def test_a_namespace_of_a_running_store_is_named_so_too(directory, tmp_path):
    async def ask() -> set[str]:
        async with serving(tmp_path) as address:
            target = Target(directory, LiveStore(address, "token"))
            return await asyncio.to_thread(namespaces_of, target)

    assert asyncio.run(ask()) == {bytes(range(32)).hex()}


def test_an_import_into_an_empty_folder_says_what_to_do(directory, tmp_path):
    file, empty = tmp_path / "chain.hrpx", tmp_path / "empty"
    values("export", file, directory, "--all")
    empty.mkdir()
    said = run("import", file, empty, status=2).replace("\n", " ")
    assert f"there is no store in {empty} yet" in said
    assert "`salt` file" in said and "`headrace up`" in said
    assert list(empty.iterdir()) == []


def test_a_chain_behind_exact_blocks_is_no_torn_one(directory, tmp_path):
    """Mode `replay`: its own blocks follow exact ones, which are of another namespace."""

    async def put() -> None:
        async with serving(tmp_path) as address:
            client = StoreClient(address, "token", bytes(range(32, 64)))
            assert await client.connect(10.0)
            items = [(Digest(bytes([n]) * 32), bytes([n]) * 3000) for n in (7, 8)]
            await client.put(Kind.KV, items, first_block=2)
            torn = [(Digest(bytes([9]) * 32), bytes(3000))]
            await client.put(Kind.KV, torn, parent=DIGESTS[0], first_block=5)
            await client.close()

    asyncio.run(put())
    chains = {row["tip"]: row for row in values("ls", directory)["chains"]}
    behind, torn = chains["08" * 32], chains["09" * 32]
    assert (behind["whole"], behind["behind_exact"], behind["tokens"]) == (False, True, 512)
    assert (torn["whole"], torn["behind_exact"]) == (False, False)
    assert chains[DIGESTS[3].hex()]["behind_exact"] is False
    rows = [line for line in run("ls", directory).splitlines() if line.startswith("│")]
    assert sorted(row.split("│")[-2].strip() for row in rows) == ["behind exact", "no", "yes"]
    assert values("gc", directory)["flaws"] == {"orphan": 1}  # and the other stays


def test_a_chain_comes_back_into_a_running_store(directory, tmp_path):
    file = tmp_path / "chain.hrpx"
    values("export", file, directory, "--all")
    assert values("gc", directory, "--domain", "gold")["flaws"] == {"unwanted": 4}

    async def bring(force: bool) -> dict:
        async with serving(tmp_path) as address:
            target = Target(directory, LiveStore(address, "token"))
            return asdict(await asyncio.to_thread(import_into, target, file, force=force))

    got = asyncio.run(bring(force=True))
    assert got == {"written": 4, "known": 0, "no_room": 0, "unsaved": 0, "payload_bytes": 12_000}
    assert asyncio.run(bring(force=False))["known"] == 4
    assert values("verify", directory)["objects"] == 4
    assert values("ls", directory)["chains"][0]["tip"] == DIGESTS[3].hex()


def test_a_lost_header_comes_back(directory):
    path = directory / "segment-000000.seg"
    path.write_bytes(b"x" * 4096 + path.read_bytes()[4096:])
    assert "segment 0: damaged header" in run("verify", directory, status=1)
    assert values("rebuild-index", directory) == {"segments": {"0": 4}, "objects": 4}
    assert values("verify", directory)["objects"] == 4


@pytest.mark.parametrize("length", [0, 100, 4096, 4096 + 2 * SLOT, 200_000])
@pytest.mark.parametrize("mend", ["scrub", "rebuild-index"])
def test_a_file_that_ends_too_soon_is_damage(directory, length, mend):
    path = directory / "segment-000000.seg"
    os.truncate(path, length)
    header_gone = 0 < length < 4096
    for verb in ("verify", "gc"):
        found = values(verb, directory, status=1)
        assert found["short_segments"] == [0]
        assert found["damaged_segments"] == ([0] if header_gone else [])
        assert "segment 0: the file ends before its slots do" in run(verb, directory, status=1)
    assert values("stat", directory)["segments"]["short"] == 1
    values(mend, directory, status=1 if mend == "scrub" else 0)
    if header_gone and mend == "scrub":  # a header is for rebuild-index
        assert values("verify", directory, status=1)["damaged_segments"] == [0]
        values("rebuild-index", directory)
    left = {4096 + 2 * SLOT: 2, 200_000: 4}.get(length, 0)
    assert values("verify", directory)["objects"] == left
    assert path.stat().st_size in (256 << 10, 4096 + 63 * SLOT)


@pytest.mark.parametrize("length", [0, 4096, 8191])
def test_an_unused_segment_without_room_for_a_slot_is_damage(directory, length):
    path = directory / "segment-000003.seg"
    os.truncate(path, length)
    assert values("verify", directory, status=1)["short_segments"] == [3]
    values("scrub", directory, status=1)
    assert values("verify", directory)["short_segments"] == []
    assert path.stat().st_size == 256 << 10


def test_a_damaged_header_of_an_unused_segment_is_made_anew(directory):
    path = directory / "segment-000003.seg"
    path.write_bytes(b"x" * 4096 + path.read_bytes()[4096:])
    assert values("verify", directory, status=1)["damaged_segments"] == [3]
    assert values("rebuild-index", directory) == {"segments": {"3": 0}, "objects": 0}
    assert values("verify", directory)["objects"] == 4
    assert values("stat", directory)["segments"]["free"] == 3


@pytest.mark.parametrize("verb", ["stat", "gc"])
def test_broken_pins_are_one_sentence_and_no_nan_is_printed(directory, verb, capsys):
    for text in ("[" * 100_000, '{"version": 1, "pins": [{"name": NaN}]}'):
        (directory / "pins.json").write_text(text)
        said = run(verb, directory, status=2)
        assert "pins.json" in said and "Traceback" not in said
    capsys.readouterr()
    show({"a": [float("nan"), {"b": float("-inf")}], "c": 1.5}, "", True)
    assert json.loads(capsys.readouterr().out) == {"a": [None, {"b": None}], "c": 1.5}


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["stat", "/nowhere"], "there is no store in /nowhere"),
        (["stat"], "there is no cluster under"),
        (["ls", "--name", "x"], "there is no cluster x under"),
        (["stat", "DIR", "--name", "x"], "name a directory or a cluster (--name), not both"),
        (["warm", "ab"], "there is no cluster under"),
        (["warm"], "name chains to warm"),
        (["gc", "DIR", "--older-than", "3w"], "--older-than must be a number with s, m, h or d"),
        (["gc", "DIR", "--namespace", "xy"], "--namespace must have at least 8 digits, got 'xy'"),
        (
            ["gc", "DIR", "--namespace", "12345678"],
            "--namespace 12345678: none of the namespaces here begin so (0001020304050607)",
        ),
        (
            ["export", "F", "DIR", "--all", "--namespace", "00010203ff"],
            "--namespace 00010203ff: none of the namespaces here begin so (0001020304050607)",
        ),
        (["export", "F", "DIR"], "name chains by --tip"),
        (["export", "F", "DIR", "--tip", "0000"], "--tip 0000: none of the whole chains"),
        (["import", "/nowhere/f", "DIR"], "/nowhere/f cannot be read (No such file"),
        (["bench", "/nowhere"], "/nowhere is no folder"),
        (["export", "DIR/segment-000000.seg", "DIR", "--all"], "lies in the store"),
    ],
)
def test_refusals_are_one_sentence(directory, tmp_path, words, sentence):
    here = {"DIR": str(directory), "F": str(tmp_path / "f")}
    words = [here.get(word, word).replace("DIR/", f"{directory}/") for word in words]
    output = run(*words, status=2)
    assert sentence in output.replace("\n", " ")
    assert "Traceback" not in output


def test_the_bench_leaves_nothing_behind(tmp_path, tmp_path_factory, monkeypatch):
    # however long the temporary folder's path is: sockets do not lie in it
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path_factory.mktemp("long" * 20)))
    small = run("bench", tmp_path, "--block-bytes", 1023, status=2)
    assert "block_bytes must be at least 1024, got 1023" in small
    found = values("bench", tmp_path, "--blocks", 32, "--block-bytes", 3000)
    assert found["blocks"] == 32
    rates = ("bare_write", "bare_read", "put_host", "put_ssd", "get_host", "get_ssd")
    assert all(found[name] > 0 for name in rates)
    assert list(tmp_path.iterdir()) == []


SIZES = {
    "directory": "/x",
    "arena_bytes": 1 << 20,
    "ssd_bytes": 1 << 20,
    "segment_bytes": 1 << 18,
    "block_bytes": 100,
    "window_bytes": 100,
}


def test_the_policy_is_read_from_the_store_section():
    shares = [{"domain": "gold", "guaranteed": 0.25, "most": 0.8}]
    values = SIZES | {"metrics_port": 9464, "domain_shares": shares, "window_ttl_s": 60}
    read = read_record(StoreSettings, values, "store")
    assert read.domain_shares == (DomainShare("gold", 0.25, 0.8),)
    assert (read.metrics_port, read.window_ttl_s, read.probation_share) == (9464, 60.0, 0.25)


@pytest.mark.parametrize(
    ("section", "words"),
    [
        ({"domain_shares": [{"domain": "a", "guaranteed": 2}]}, "of a must lie between 0.0 and 1"),
        ({"domain_shares": [{"name": "a"}]}, "unknown key store.domain_shares[0].name"),
        ({"probation_share": 0.9}, "store: probation_share must lie between 0.01 and 0.5, got 0.9"),
        ({"metrics_port": 70_000}, "store: metrics_port must lie between 0 and 65535, got 70000"),
    ],
)
def test_what_is_wrong_there_is_said_by_its_key(section, words):
    with pytest.raises(ConfigError) as caught:
        read_record(StoreSettings, SIZES | section, "store")
    assert words in caught.value.message
