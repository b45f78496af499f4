"""Prefix files into a store that goes on serving."""

from __future__ import annotations

import asyncio
import errno
import random
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import pytest_asyncio
from headrace_tests_kvstore_disk import Troubled

from headrace.kvstore import Kind
from headrace.kvstore.layout import domain_tag
from headrace.kvstore.policy import DomainShare
from headrace.kvstore.questions import StoreSilent
from headrace.kvstore.workshop import carry, live, live_import
from headrace.kvstore.workshop.directory import StoreDirectory
from headrace.kvstore.workshop.shipping import FileRefused, read_objects

TOKEN = "a cluster token of tests"
BLOCKS = 100
WINDOWS = (3, 40, 99)  # of chains of 4, 41 and 100 blocks: the first would be held back
OBJECTS = BLOCKS + len(WINDOWS)
ROOM = {"arena_bytes": 1 << 20, "ssd_bytes": 4 << 20}


@pytest_asyncio.fixture
async def shipped(rig, things, when_idle, tmp_path, no_progress) -> Path:
    """A prefix file of one chain with three window records; the store that it is of has ended."""
    await rig.start(**ROOM)
    client = await rig.client()
    for begin in range(0, BLOCKS, 20):
        await client.put(
            Kind.KV,
            things.blocks(*range(begin, begin + 20)),
            parent=things.digest(begin - 1) if begin else None,
            first_block=begin,
            domain="gold",
        )
        await when_idle(client)
    for n in WINDOWS:
        await client.put(
            Kind.SWA, things.windows(n), parent=things.digest(n), first_block=n + 1, domain="gold"
        )
        await client.open_objects(Kind.SWA, [things.window(n)], None)
        await when_idle(client)
    await client.close()
    rig.clients.clear()
    await rig.stop()
    path = tmp_path / "chain.hrpx"
    with StoreDirectory(Path(rig.settings.directory)) as files:
        tips = [things.digest(BLOCKS - 1)]
        about = carry.export_chains(files, things.namespace, tips, path, no_progress)
    assert about.objects == OBJECTS
    return path


@pytest_asyncio.fixture
async def other(rig, shipped):
    """Settings of another store with the same salt, at the same socket; not started."""
    directory = Path(f"{rig.home}/other")
    directory.mkdir(mode=0o700)
    shutil.copy2(Path(rig.settings.directory) / "salt", directory / "salt")
    return {"directory": str(directory), **ROOM}


async def bring(rig, path, progress=lambda done, total: None, **options):
    """In a thread, as a tool of its own, while this loop serves."""
    store = live.LiveStore(rig.role.listen, TOKEN)
    directory = Path(rig.settings.directory)
    return await asyncio.to_thread(
        live_import.import_file, store, directory, path, progress, **options
    )


async def check_all(client, things, *, at_once: bool = True) -> None:
    """Everything of the file is there, byte for byte, and nothing is held."""
    if at_once:
        places = await client.open_prefix([things.digest(n) for n in range(BLOCKS)], None)
        assert len(places) == BLOCKS
    dest = bytearray(7000)
    for begin in range(0, BLOCKS, 20):
        some = [things.digest(n) for n in range(begin, begin + 20)]
        places = await client.open_objects(Kind.KV, some, things.lease("look"))
        for number, place in zip(range(begin, begin + 20), places, strict=True):
            assert client.read_into(place, things.digest(number), dest)
            assert dest[:3000] == things.payload(number)
        await client.release(things.lease("look"))
    for n in WINDOWS:
        found = await client.open_windows([((n + 1) * 128, things.digest(n))], None)
        assert found is not None and client.read_into(found[1], things.window(n), dest)
        assert bytes(dest) == things.payload(n, 7000)
    stat = await client.stat()
    assert (stat.leases, stat.leased_objects, stat.reservations, stat.damaged) == (0, 0, 0, 0)


async def test_what_comes_in_is_on_disk_in_its_domain_and_found(rig, other, shipped, things):
    await rig.start(**other)
    client = await rig.client()
    steps: list[tuple[int, int]] = []
    done = await bring(rig, shipped, lambda *at: steps.append(at), force=False)
    assert (done.written, done.known, done.no_room, done.unsaved) == (OBJECTS, 0, 0, 0)
    assert done.payload_bytes == BLOCKS * 3000 + len(WINDOWS) * 7000
    assert steps[-1] == (2 * OBJECTS, 2 * OBJECTS) and steps == sorted(steps)
    assert (await client.stat()).ssd_objects == OBJECTS
    await rig.cut()  # at once: what was said to be written is on disk
    await rig.start()
    again = await bring(rig, shipped)
    assert (again.written, again.known, again.no_room) == (0, OBJECTS, 0)
    assert await client.connect(10.0)
    await check_all(client, things)
    await client.close()
    await rig.stop()
    with StoreDirectory(Path(rig.settings.directory)) as files:
        here = {h.facts: h.checksum for _, h in files.objects().values()}
    assert here == {header.facts: header.checksum for header, _ in read_objects(shipped)}
    assert {facts.domain for facts in here} == {domain_tag("gold")}


async def test_what_does_not_belong_here_is_refused_before_anything_is_written(
    rig, other, shipped, things, when_idle, tmp_path
):
    await rig.start(**other)
    salt, right = Path(other["directory"]) / "salt", Path(other["directory"], "salt").read_bytes()
    salt.write_bytes(bytes(32))
    with pytest.raises(FileRefused, match="exported under another salt"):
        await bring(rig, shipped, force=True)
    salt.write_bytes(right)
    client = await rig.client(things.other_namespace)
    await client.put(Kind.KV, things.blocks(7))
    await when_idle(client)
    with pytest.raises(FileRefused, match=f"{things.namespace.hex()[:16]}.* --new-namespace"):
        await bring(rig, shipped)
    data, draw = shipped.read_bytes(), random.Random(5)
    damaged = tmp_path / "damaged.hrpx"
    for _ in range(25):
        changed = bytearray(data)
        changed[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
        damaged.write_bytes(changed)
        with pytest.raises(FileRefused):
            await bring(rig, damaged, force=True)
    for end in (0, 4095, 4096, 9000, len(data) - 1):
        damaged.write_bytes(data[:end])
        with pytest.raises(FileRefused):
            await bring(rig, damaged, force=True)
    stat = await when_idle(client)
    assert (stat.blocks, stat.windows, stat.ssd_objects) == (1, 0, 1)
    assert (await bring(rig, shipped, force=True)).written == OBJECTS


async def test_another_models_sizes_are_refused(rig, other, shipped, things, when_idle):
    await rig.start(**other, window_bytes=3000)  # slots of one page
    with pytest.raises(FileRefused, match="at most 3584 bytes .* kind swa have 7000"):
        await bring(rig, shipped)
    await rig.stop()
    await rig.start(**other, block_bytes=4000, window_bytes=7000)
    client = await rig.client()
    await client.put(Kind.KV, [(things.digest(900), bytes(4000))])
    await when_idle(client)
    with pytest.raises(FileRefused, match="have 4000 bytes in this namespace here, .* file 3000"):
        await bring(rig, shipped)
    assert (await when_idle(client)).ssd_objects == 1


async def test_it_pushes_nothing_off_the_disk_and_takes_heads_first(
    rig, other, shipped, things, when_idle
):
    """Eight segments of four slots: two hold other blocks, six are free."""
    small = {"segment_bytes": 20 << 10, "ssd_bytes": 8 * (20 << 10)}
    await rig.start(**{**other, **small})
    client = await rig.client()
    await client.put(Kind.KV, things.blocks(*range(900, 908)))
    assert (await when_idle(client)).ssd_objects == 8
    done = await bring(rig, shipped)
    assert (done.written, done.known, done.no_room) == (24, 0, OBJECTS - 24)
    stat = await when_idle(client)
    assert (stat.ssd_objects, stat.recycled, stat.ssd_segments_free) == (32, 0, 0)
    await rig.restart()
    assert len(await client.open_prefix([things.digest(n) for n in range(BLOCKS)], None)) == 24
    others = await client.open_objects(Kind.KV, [things.digest(n) for n in range(900, 908)], None)
    assert None not in others
    again = await bring(rig, shipped)
    assert (again.written, again.known, again.no_room) == (0, 24, OBJECTS - 24)


async def test_it_stays_within_the_share_of_its_domain(rig, other, shipped, things, when_idle):
    """In memory a domain with a guarantee loses nothing to it; all of it goes to disk."""
    shares = (DomainShare("tin", guaranteed=0.5), DomainShare("gold", most=0.25))
    await rig.start(**{**other, "arena_bytes": 600_000}, domain_shares=shares)
    client = await rig.client()
    tin = [things.digest(n) for n in range(900, 960)]
    await client.put(Kind.KV, things.blocks(*range(900, 960)), domain="tin")
    slots = (await when_idle(client)).arena_slots
    assert slots / 2 > 60 and slots < 60 + BLOCKS  # not all of both would fit
    done = await bring(rig, shipped)
    assert (done.written, done.no_room, done.unsaved) == (OBJECTS, 0, 0)
    stat = await when_idle(client)
    assert stat.arena_resident <= 60 + slots // 4 + len(WINDOWS) < 60 + BLOCKS
    loads = stat.loads
    assert None not in await client.open_objects(Kind.KV, tin, None)
    assert (await client.stat()).loads == loads  # none of them had left the arena
    await check_all(client, things, at_once=False)


class Stopped(Exception):
    pass


@pytest.mark.parametrize("how", ["tool", "store"])
async def test_one_that_was_interrupted_goes_on(rig, other, shipped, things, when_idle, how):
    await rig.start(**other)
    client = await rig.client()
    loop = asyncio.get_running_loop()
    ending: list[asyncio.Task[None]] = []

    def stop(done: int, total: int) -> None:
        if done > OBJECTS and not ending:
            if how == "tool":
                raise Stopped
            cutting = asyncio.run_coroutine_threadsafe(rig.cut(), loop)
            cutting.result(20)
            ending.append(asyncio.Task)

    with pytest.raises(Stopped if how == "tool" else StoreSilent):
        await bring(rig, shipped, stop)
    if how == "store":
        await rig.start()
        assert await client.connect(10.0)
    before = (await when_idle(client)).ssd_objects
    assert 8 <= before < OBJECTS
    stat = await client.stat()
    assert (stat.leases, stat.reservations) == (0, 0)
    done = await bring(rig, shipped)
    assert (done.known, done.written, done.no_room) == (before, OBJECTS - before, 0)
    await check_all(client, things)


async def test_a_killed_tool_leaves_nothing_held(rig, other, shipped, things, when_idle):
    """A process that imports and is killed in the middle; then another one ends the work."""
    await rig.start(**other)
    client = await rig.client()
    code = (
        "import sys, time; from pathlib import Path\n"
        "from headrace.kvstore.workshop import live, live_import\n"
        "def step(done, total):\n"
        "    if done > total // 2: print('begun', flush=True); time.sleep(600)\n"
        "store = live.LiveStore(sys.argv[1], sys.argv[2])\n"
        "live_import.import_file(store, Path(sys.argv[3]), Path(sys.argv[4]), step)\n"
    )
    arguments = [rig.role.listen, TOKEN, other["directory"], str(shipped)]
    process = subprocess.Popen([sys.executable, "-c", code, *arguments], stdout=subprocess.PIPE)
    assert process.stdout is not None
    try:
        assert await asyncio.to_thread(process.stdout.readline) == b"begun\n"
    finally:
        process.kill()
        process.stdout.close()
    assert process.wait(10) == -signal.SIGKILL
    before = (await when_idle(client)).ssd_objects
    assert 0 < before < OBJECTS
    done = await bring(rig, shipped)
    assert (done.known, done.written, done.no_room) == (before, OBJECTS - before, 0)
    await check_all(client, things)


async def test_a_disk_that_fails_is_said(rig, other, shipped, things, when_idle):
    disk = Troubled()
    rig.options = {"calls": disk}
    await rig.start(**other)
    client = await rig.client()
    disk.errors, disk.after = {"pwrite": errno.EIO}, 8
    done = await bring(rig, shipped)
    assert disk.took_effect["pwrite"] > 0
    assert done.written + done.unsaved + done.no_room == OBJECTS and done.unsaved > 0
    assert (await when_idle(client)).ssd_objects == done.written < OBJECTS


async def test_requests_go_on_while_it_comes_in(rig, other, shipped, things, when_idle):
    await rig.start(**other)
    client = await rig.client()
    await client.put(Kind.KV, things.blocks(900, 901))
    await when_idle(client)
    bringing = asyncio.create_task(bring(rig, shipped))
    served = 0
    lease = things.lease("a request")
    while not bringing.done():
        places = await client.open_prefix([things.digest(900), things.digest(901)], lease)
        dest = bytearray(3000)
        assert client.read_into(places[1], things.digest(901), dest)
        assert bytes(dest) == things.payload(901)
        served += 1
    assert (await bringing).written == OBJECTS and served > 3
    await client.release(lease)
