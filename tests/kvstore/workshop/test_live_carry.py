"""Exports and clean-ups of a store that goes on serving."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
from pathlib import Path

import pytest

from headrace.core.clock import FakeClock
from headrace.kvstore import Kind
from headrace.kvstore.layout import domain_tag
from headrace.kvstore.questions import StoreRefused, Topic
from headrace.kvstore.workshop import carry, live
from headrace.kvstore.workshop.directory import StoreDirectory
from headrace.kvstore.workshop.garbage import Wishes
from headrace.kvstore.workshop.shipping import FileRefused, read_objects, verify_file

TOKEN = "a cluster token of tests"


def store_of(rig) -> live.LiveStore:
    return live.LiveStore(rig.role.listen, TOKEN)


async def export(rig, things, tips, path, **options):
    """In a thread, as a tool of its own, while this loop serves."""
    return await asyncio.to_thread(
        live.export_chains,
        store_of(rig),
        Path(rig.settings.directory),
        things.namespace,
        [things.digest(tip) for tip in tips],
        path,
        lambda done, total: None,
        **options,
    )


async def chains(rig, things, when_idle) -> None:
    """Of five blocks with a window record, and of four, which share their first two."""
    client = await rig.client()
    await client.put(Kind.KV, things.blocks(0, 1, 2, 3, 4), domain="gold")
    await client.put(
        Kind.KV, things.blocks(10, 11), parent=things.digest(1), first_block=2, domain="gold"
    )
    await client.put(Kind.SWA, things.windows(4), parent=things.digest(4), domain="gold")
    await when_idle(client)


async def test_an_export_of_a_running_store_is_that_of_its_directory(
    rig, things, when_idle, tmp_path, no_progress
):
    await rig.start(arena_bytes=60_000)  # room for fewer objects than there are, and on disk
    await chains(rig, things, when_idle)
    (client,) = rig.clients
    await client.put(Kind.KV, things.blocks(*range(100, 130)))  # the chains leave the arena
    await when_idle(client)
    alive = tmp_path / "alive.hrpx"
    about = await export(rig, things, (4, 11), alive)
    assert (about.objects, about.payload_bytes) == (8, 7 * 3000 + 7000)
    assert alive.stat().st_mode & 0o777 == 0o600
    assert verify_file(alive, no_progress) == about
    stat = await when_idle(client)
    assert (stat.leases, stat.leased_objects, stat.damaged) == (0, 0, 0)
    await rig.stop()
    still = tmp_path / "still.hrpx"
    with StoreDirectory(Path(rig.settings.directory)) as files:
        tips = [things.digest(4), things.digest(11)]
        carry.export_chains(files, things.namespace, tips, still, no_progress)
    assert _content(alive) == _content(still) and len(_content(alive)) == 8


def _content(path: Path):
    return [
        (h.facts, h.checksum, h.written_at_s, bytes(payload)) for h, payload in read_objects(path)
    ]


async def test_what_was_exported_alive_is_found_after_an_import(
    rig, home, things, when_idle, tmp_path, no_progress, new_rig
):
    await rig.start()
    await chains(rig, things, when_idle)
    file = tmp_path / "a.hrpx"
    await export(rig, things, (4,), file)
    other = new_rig(home, directory=f"{home}/other")
    await rig.stop()
    Path(f"{home}/other").mkdir()
    shutil.copy(f"{rig.settings.directory}/salt", f"{home}/other/salt")
    await other.start()
    await other.stop()
    with StoreDirectory(Path(f"{home}/other")) as files:
        assert carry.import_file(files, file, no_progress).written == 6
    await other.start()
    try:
        client = await other.client()
        places = await client.open_prefix([things.digest(n) for n in range(5)], None)
        dest = bytearray(3000)
        for number, place in enumerate(places):
            assert client.read_into(place, things.digest(number), dest)
            assert bytes(dest) == things.payload(number)
        assert len(places) == 5
    finally:
        await other.close()


async def test_an_export_under_reuse_is_whole_or_refused(
    rig, things, when_idle, tmp_path, no_progress
):
    """Segments are reused under it: a file that is there is a sound one of the whole chain."""
    await rig.start(arena_bytes=120_000, ssd_bytes=3 * (64 << 10), segment_bytes=64 << 10)
    client = await rig.client()
    file, outcomes = tmp_path / "a.hrpx", set()
    for round_ in range(12):
        begin = 1000 * round_
        await client.put(Kind.KV, things.blocks(*range(begin, begin + 8)))
        await when_idle(client)
        work = asyncio.create_task(export(rig, things, (begin + 7,), file, force=True))
        for more in range(begin + 100, begin + 100 + 8 * round_, 8):
            await client.put(Kind.KV, things.blocks(*range(more, more + 8)))
        try:
            about = await work
        except (FileRefused, StoreRefused):
            outcomes.add("refused")
            continue
        outcomes.add("whole")
        assert about.objects == 8 and verify_file(file, no_progress) == about
        assert [payload for *_, payload in _content(file)] == [
            things.payload(n) for n in range(begin, begin + 8)
        ]
    assert "whole" in outcomes
    assert [path.name for path in tmp_path.iterdir()] == ["a.hrpx"]  # nothing half-written
    assert (await when_idle(client)).leased_objects == 0


async def test_exports_that_cannot_be(rig, things, when_idle, tmp_path):
    await rig.start()
    await chains(rig, things, when_idle)
    with pytest.raises(StoreRefused, match="is not stored whole"):
        await export(rig, things, (99,), tmp_path / "a")
    (tmp_path / "b").write_text("mine")
    with pytest.raises(FileRefused, match="--force replaces it"):
        await export(rig, things, (4,), tmp_path / "b")
    assert (tmp_path / "b").read_text() == "mine"
    with pytest.raises(FileRefused, match="lies in the store"):
        await export(rig, things, (4,), Path(rig.settings.directory) / "c")


@pytest.fixture
async def old(rig, things, when_idle):
    """A running store whose objects are two minutes old: two chains, and a tail without head."""
    clock = FakeClock()
    rig.options = {"clock": clock}
    await rig.start()
    await chains(rig, things, when_idle)
    (client,) = rig.clients
    await client.put(
        Kind.KV, things.blocks(50, 51), parent=things.digest(49), first_block=7, domain="tin"
    )
    await when_idle(client)
    clock.advance(120)
    return rig


async def clean(rig, wishes=None, *, dry_run=False):
    return await asyncio.to_thread(live.clean, store_of(rig), wishes or Wishes(), dry_run=dry_run)


async def there(rig, things) -> list[int]:
    (client,) = rig.clients
    found = []
    for number in (0, 1, 2, 3, 4, 10, 11, 50, 51):
        if (await client.open_objects(Kind.KV, [things.digest(number)], None))[0] is not None:
            found.append(number)
    return found


async def test_a_running_store_loses_what_nobody_can_reach(old, things, when_idle):
    everything = await there(old, things)
    assert len(everything) == 9
    said = await clean(old, dry_run=True)
    assert (said["read"], said["objects"], said["flaws"]) == (10, 8, {"orphan": 2})
    assert await there(old, things) == everything
    assert (await clean(old))["flaws"] == {"orphan": 2}
    assert await there(old, things) == [0, 1, 2, 3, 4, 10, 11]
    assert (await clean(old))["flaws"] == {}
    await old.restart()  # and not only in memory
    assert await there(old, things) == [0, 1, 2, 3, 4, 10, 11]


async def test_a_block_that_hangs_on_nothing_is_no_orphan(old, things, when_idle):
    """The first block behind a prefix that is stored in another class."""
    (client,) = old.clients
    await client.put(Kind.KV, things.blocks(70, 71), parent=None, first_block=3, domain="gold")
    await when_idle(client)
    old.options["clock"].advance(120)
    assert (await clean(old))["flaws"] == {"orphan": 2}
    places = await client.open_objects(Kind.KV, [things.digest(n) for n in (70, 71)], None)
    assert None not in places


async def test_what_is_young_leased_or_pinned_stays(old, things, when_idle):
    (client,) = old.clients
    lease = things.lease("a request")
    assert len(await client.open_objects(Kind.KV, [things.digest(51)], lease)) == 1
    await client.ask(
        Topic.PIN, name="p", namespace=things.namespace.hex(), tip=things.digest(11).hex(),
        ttl_s=3600.0,
    )  # fmt: skip
    await client.put(
        Kind.KV, things.blocks(60), parent=things.digest(59), first_block=3, domain="gold"
    )
    await when_idle(client)
    said = await clean(old, Wishes(domains=frozenset((domain_tag("gold"), domain_tag("tin")))))
    assert said["flaws"] == {"unwanted": 5}  # 2, 3, 4, the window record there, and 50
    assert await there(old, things) == [0, 1, 10, 11, 51]
    (young,) = await client.open_objects(Kind.KV, [things.digest(60)], None)
    assert young is not None
    await client.release(lease)


async def test_age_and_namespace(old, things):
    now_s = int(old.options["clock"].wall_s())
    assert (await clean(old, Wishes(now_s - 3600)))["flaws"] == {"orphan": 2}
    assert (await clean(old, Wishes(namespaces=frozenset((things.other_namespace,)))))[
        "flaws"
    ] == {}
    assert (await clean(old, Wishes(now_s)))["flaws"] == {"unwanted": 8}
    assert await there(old, things) == []


async def test_requests_go_on_while_it_is_cleaned(old, things, when_idle):
    (client,) = old.clients

    async def serve() -> int:
        served = 0
        with contextlib.suppress(asyncio.CancelledError):
            while True:
                places = await client.open_prefix([things.digest(n) for n in range(5)], None)
                assert len(places) == 5
                served += 1
        return served

    serving = asyncio.create_task(serve())
    for _ in range(5):
        await clean(old)
    serving.cancel()
    assert await serving > 0
    assert (await when_idle(client)).damaged == 0
