"""Boot ids: new with every life, and half of them says which store it is."""

from __future__ import annotations

from pathlib import Path

from headrace.core.ids import BootId
from headrace.kvstore import Kind
from headrace.kvstore.lives import epoch_of, new_life, same_store


def test_a_life_names_its_store():
    uid = bytes.fromhex("89abcdef01234567")
    lives = {new_life(uid) for _ in range(50)}
    assert len(lives) == 50
    assert {life[8:] for life in lives} == {"89abcdef"}
    assert epoch_of(BootId("00ff00ff89abcdef")) == 0x00FF00FF
    assert all(same_store(BootId("00ff00ff89abcdef"), life) for life in lives)
    assert not same_store(new_life(uid), new_life(uid[::-1]))


async def test_two_lives_of_a_store_are_told_from_those_of_another(
    rig, home, new_rig, things, when_idle
):
    await rig.start()
    client = await rig.client()
    await client.put(Kind.KV, things.blocks(1))  # its files carry its id from now on
    first = (await when_idle(client)).boot
    await rig.restart()
    second = (await when_idle(client)).boot
    Path(f"{home}/b").mkdir()
    other = new_rig(f"{home}/b")
    await other.start()
    try:
        third = (await (await other.client()).stat()).boot
    finally:
        await other.close()
    assert len({first, second, third}) == 3
    assert same_store(first, second) and not same_store(first, third)
    heads = [path.read_bytes()[:40] for path in Path(rig.settings.directory).glob("segment-*")]
    (in_use,) = [head for head in heads if head[6]]
    assert in_use[32:36].hex() == second[8:]  # docs/kv-format.md: id of the store
