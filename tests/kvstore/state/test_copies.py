"""Copies of other stores' objects, entered by the batch: as if each had come alone."""

from __future__ import annotations

from headrace.core.ids import Digest
from headrace.kvstore.copies import enter_copies, offered_copies, take_slots
from headrace.kvstore.layout import NO_DIGEST, checksum, domain_tag, pack_slot_header
from headrace.kvstore.policy import DomainShare, StorePolicy
from headrace.kvstore.records import ARENA_SEGMENT
from headrace.kvstore.settings import Kind

GOLD = domain_tag("gold")


def copies(world, numbers, domain=bytes(16), written_at_s=1):
    told, parent = [], NO_DIGEST
    for number in numbers:
        total = checksum(world.content(number))
        digest = world.digest(number)
        told.append((digest, number, world.size_bytes, total, written_at_s, parent, domain))
        parent = Digest(digest)
    return offered_copies(Kind.KV, world.namespace, told)


def entered(world, new, pins):
    slots = take_slots(world.state, new)
    assert len(slots) == len(new)
    region = world.state.residents.regions[Kind.KV]
    for copy, slot in zip(new, slots, strict=True):
        world.arena.payload(region, slot, world.size_bytes)[:] = world.content(copy.facts.block)
    return enter_copies(world.state, new, slots, pins)


def test_each_has_the_header_of_its_own_domain_time_and_place(make_world):
    policy = StorePolicy(domain_shares=(DomainShare("gold", guaranteed=0.25, most=0.75),))
    world = make_world(16, policy)
    new = copies(world, (1, 2)) + copies(world, (3, 4), GOLD) + copies(world, (5, 6), GOLD, 9)
    out = entered(world, new, 0)
    assert out == new
    region = world.state.residents.regions[Kind.KV]
    for entry in out:
        at = (ARENA_SEGMENT, entry.slot, entry.generation)
        wanted = pack_slot_header(entry.facts, entry.checksum, *at, entry.written_at_s)
        assert bytes(world.arena.header(region, entry.slot)) == wanted
        assert world.reads(entry.facts.block) == world.content(entry.facts.block)
    assert [entry.written_at_s for entry in out] == [1, 1, 1, 1, 9, 9]
    assert world.state.residents.orders[Kind.KV].taken == [2, 4]
    world.state.check()


def test_what_is_let_go_may_leave_the_tail_first(make_world):
    world = make_world(4)
    out = entered(world, copies(world, (1, 2, 3, 4)), 1)
    order = world.state.residents.orders[Kind.KV]
    assert not order.may_leave()
    world.state.check()
    world.state.unpin_all(out)
    world.state.check()
    for number in (4, 3, 2, 1):
        assert order.victim(0) is out[number - 1]
        world.state.residents.leave(out[number - 1])
    assert world.free == 4


def test_settled_are_objects_of_several_kinds_and_dropped_ones(make_world):
    world = make_world(4)
    state = world.state
    mixed = [world.put(1), world.put(2, kind=Kind.SWA), world.put(3)]
    for entry in mixed:
        state.pin(entry)
    world.save()
    state.drop(mixed[2], erase=False)  # a ghost: its slot is in use
    assert world.free == 2 and state.residents.orders[Kind.KV].may_leave() == frozenset()
    state.unpin_all(mixed)
    assert world.free == 3
    assert state.residents.orders[Kind.KV].may_leave() == {mixed[0]}
    assert state.residents.orders[Kind.SWA].may_leave() == {mixed[1]}
    state.check()
