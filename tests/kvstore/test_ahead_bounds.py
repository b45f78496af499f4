"""Slots held in advance cost nobody anything: a client that was stopped, a full arena, small
domains, a store that ends."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from headrace.core.deployment import Deployment
from headrace.core.errors import ConfigError
from headrace.core.limits import LeaseTimes
from headrace.kvstore import Kind
from headrace.kvstore.policy import DomainShare

PROCESS = Path(__file__).with_name("store_process.py")
SIZE = 3000


def read(client, place, digest):
    dest = bytearray(SIZE)
    return bytes(dest) if client.read_into(place, digest, dest) else None


def is_stopped(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


def reserve_of(rig, reserve_s: float) -> None:
    leases = LeaseTimes(connection_reserve_s=reserve_s)
    rig.role = replace(rig.role, deployment=Deployment(leases=leases))


async def put_row(client, things, begin, end, step=8, **options):
    """Blocks of one chain, `step` a put; their places."""
    places = []
    for number in range(begin, end, step):
        places += await client.put(
            Kind.KV,
            things.blocks(*range(number, min(number + step, end))),
            first_block=number,
            parent=things.digest(number - 1) if number else None,
            **options,
        )
    return places


@pytest.mark.fault
async def test_a_client_stopped_while_it_asks_writes_over_nobody(
    rig, things, wait_until, when_idle
):
    """What it was granted has been another's for long when it reads the answer."""
    reserve_of(rig, 1.0)
    await rig.start(ahead_slots=12)
    client = await rig.client()
    told = {"address": rig.role.listen, "namespace": things.namespace.hex()}
    late = subprocess.Popen(
        [sys.executable, "-P", str(PROCESS), "late", json.dumps(told)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    try:

        async def granted(count: int) -> bool:
            stat = await client.stat()
            return (stat.granted > 0) == (count > 0)

        async def stopped() -> bool:
            return is_stopped(late.pid)

        await wait_until(stopped, "the client stops")
        await wait_until(lambda: granted(1), "its slots")
        await wait_until(lambda: granted(0), "their end")
        assert is_stopped(late.pid)
        mine = (await client.stat()).arena_free
        places = await put_row(client, things, 0, mine, 1, lease=things.lease(), wait_s=0.2)
        numbers = [number for number, place in enumerate(places) if place is not None]
        assert len(numbers) > 100
        await when_idle(client)
        late.send_signal(signal.SIGCONT)
        line = await asyncio.to_thread(late.stdout.readline)
        assert json.loads(line)["asked"] >= 1  # it has put more since
        for number in numbers:
            assert read(client, places[number], things.digest(number)) == things.payload(number)
        assert (await client.stat()).damaged == 0
    finally:
        late.send_signal(signal.SIGCONT)
        late.kill()
        late.wait(10)
        late.stdin.close()
        late.stdout.close()


async def test_what_is_too_few_for_a_batch_is_not_kept(rig, things, when_idle):
    """In an arena where others lease all but 32 slots, a client puts so many blocks again and
    again, nobody leasing them: its own slots in advance are not what it lacks."""
    await rig.start(arena_bytes=2 << 20, ssd_bytes=16 << 20, segment_bytes=1 << 20)
    client, other = await rig.client(), await rig.client()
    slots = client._connection.arena.region(Kind.KV).slots
    for number in range(500_000, 500_000 + slots - 32):
        (place,) = await other.put(
            Kind.KV, things.blocks(number), lease=things.lease(), wait_s=5.0, first_block=number
        )
        assert place is not None
    other._connection.ahead.give_back()
    await when_idle(other)
    dropped = 0
    for begin in range(0, 32 * 12, 32):
        places = await put_row(client, things, begin, begin + 32, 32)
        dropped += places.count(None)
        assert len(client._connection.ahead) == 0
        await when_idle(client)  # what it put before may leave
        await asyncio.sleep(0.002)
    assert dropped == 0


async def test_batches_above_the_bound_hold_and_push_out_nothing(rig, things, when_idle):
    await rig.start(arena_bytes=4 << 20, ssd_bytes=16 << 20, segment_bytes=1 << 20, ahead_slots=8)
    client = await rig.client()
    for begin in range(0, 320, 16):
        await put_row(client, things, begin, begin + 16, 16, wait_s=5.0)
        assert (len(client._connection.ahead), (await client.stat()).granted) == (0, 0)
    stat = await when_idle(client)
    assert (stat.blocks, stat.refused) == (320, 0)


@pytest.mark.parametrize("domain", ["small", ""])
async def test_a_short_row_pushes_out_about_as_much_as_it_puts(rig, things, when_idle, domain):
    """34 new blocks, two at a time, into a share or an arena that is full of others."""
    share = DomainShare("small", 0.1, 0.1)
    await rig.start(
        arena_bytes=8 << 20, ssd_bytes=32 << 20, segment_bytes=4 << 20, domain_shares=(share,)
    )
    client, other = await rig.client(), await rig.client()
    slots = client._connection.arena.region(Kind.KV).slots
    full = int(slots * share.most) if domain else slots
    await put_row(other, things, 0, full, domain=domain, wait_s=5.0)
    other._connection.ahead.give_back()
    before = await when_idle(client)
    assert domain or before.arena_free < 16 + slots // 4  # windows and pictures have their own
    await put_row(client, things, 10_000, 10_034, 2, domain=domain)
    stat = await client.stat()
    assert 0 < stat.granted <= 4  # it was served in advance
    assert stat.evicted - before.evicted <= 34 + 4


async def test_a_domain_grants_a_sixteenth_of_its_most(rig, things):
    share = DomainShare("small", 0.1, 0.1)
    await rig.start(arena_bytes=8 << 20, ssd_bytes=32 << 20, domain_shares=(share,))
    client = await rig.client()
    slots = client._connection.arena.region(Kind.KV).slots
    most = 0
    for begin in range(0, 400, 2):
        await put_row(client, things, begin, begin + 2, 2, domain="small")
        most = max(most, (await client.stat()).granted)
    assert 2 <= most <= int(slots * share.most) // 16


@pytest.mark.parametrize("reserve_s", [0.0, 0.99, 3600.5])
def test_the_time_for_which_slots_wait_has_bounds(reserve_s):
    with pytest.raises(ConfigError, match="connection_reserve_s.*1.0.*3600.0.*got"):
        Deployment(leases=LeaseTimes(connection_reserve_s=reserve_s))
