"""The store's books without sockets, with a clock that only moves when told to."""

from __future__ import annotations

import pytest

from headrace.core.states import Visibility, VisibilityEvent
from headrace.kvstore.commits import commit_blocks
from headrace.kvstore.counters import Eviction
from headrace.kvstore.eviction import RecyclePlan
from headrace.kvstore.layout import SlotHeader, checksum, domain_tag, pack_slot_header
from headrace.kvstore.objects import DiskPlace, Saving
from headrace.kvstore.policy import DomainShare, StorePolicy
from headrace.kvstore.records import ARENA_SEGMENT
from headrace.kvstore.residents import StoreDamaged
from headrace.kvstore.settings import Kind


def test_nothing_is_readable_before_the_seal(world):
    made = world.state.reserve(1, world.facts(1), None)
    world.write(made)
    assert world.state.find(Kind.KV, world.namespace, world.digest(1)) is None
    region, slot = world.arena.locate(world.state.offset(made))
    assert SlotHeader.unpack(world.arena.header(region, slot)) is None
    entry = world.state.seal(1, made.number, checksum(world.content(1)))
    assert entry.visibility is Visibility.SEALED and world.reads(1) == world.content(1)
    assert SlotHeader.unpack(world.arena.header(region, slot)).segment == ARENA_SEGMENT


def test_visibilities_come_in_order_and_durable_does_not_wait_for_the_index(world):
    one, two = world.put(1), world.put(2)
    assert one.step(VisibilityEvent.LIST) and one.visibility is Visibility.LISTED
    world.save()
    assert one.visibility is two.visibility is Visibility.DURABLE
    assert not two.step(VisibilityEvent.LIST) and two.visibility is Visibility.DURABLE


def test_only_the_connection_that_reserved_may_seal_and_only_once(world):
    made = world.state.reserve(1, world.facts(1), None)
    assert world.state.seal(2, made.number, 5) is None
    assert world.state.seal(1, made.number, checksum(world.content(1))) is not None
    assert world.state.seal(1, made.number, 5) is None
    assert world.state.seal(1, 999, 5) is None
    assert world.state.count.refused == 3
    world.state.check()


def test_the_second_writer_of_an_object_gives_its_slot_back(world):
    first, second = (world.state.reserve(c, world.facts(1), None) for c in (1, 2))
    world.write(second)
    entry = world.state.seal(2, second.number, checksum(world.content(1)))
    assert world.state.seal(1, first.number, 12345) is entry
    assert entry.checksum == checksum(world.content(1)) and world.free == 3
    world.state.check()


def test_a_closed_or_silent_connection_frees_its_reservations(world):
    for connection in (1, 1, 2):
        world.state.reserve(connection, world.facts(connection), None)
    late = world.state.reserve(2, world.facts(3), None)
    assert world.free == 0 and world.state.reserve(3, world.facts(4), None) is None
    assert world.state.reserving.close_connection(1) == 2 and world.free == 2
    world.clock.advance(29.9)
    world.state.expire()
    assert len(world.state.reserving) == 2
    world.clock.advance(0.2)
    world.state.expire()
    assert len(world.state.reserving) == 0 and world.free == 4
    assert world.state.seal(2, late.number, 1) is None  # too late
    assert world.state.reserving.abandon(2, [late.number]) == 0
    world.state.check()


def test_leases_expire_are_renewed_and_end_for_good(world):
    entry = world.put(1, world.lease(1))
    world.clock.advance(20)
    assert world.state.leases.renew(world.lease(1)) and not world.state.leases.renew(world.lease(2))
    world.clock.advance(20)
    world.state.expire()
    assert entry.leases == {world.lease(1)}
    world.clock.advance(10)
    world.state.expire()
    assert entry.leases == set() and len(world.state.leases) == 0
    # expiry does not end the owner, release does: for one lease time
    assert world.state.hold(world.lease(1), [entry])
    world.state.release(world.lease(1), None)
    world.state.release(world.lease(1), None)
    assert not world.state.hold(world.lease(1), [entry]) and world.state.leases.late == 1
    world.clock.advance(31)
    world.state.expire()
    assert world.state.hold(world.lease(1), [entry])
    world.state.check()


def test_two_owners_hold_one_object(world):
    entry = world.put(1, world.lease(1))
    world.state.hold(world.lease(2), [entry])
    world.save()
    world.state.release(world.lease(1), None)
    for number in (2, 3, 4):
        world.put(number)
    assert world.put(5) is None  # nothing may go: 1 is held, 2..4 are not saved
    world.state.release(world.lease(2), None)
    assert world.put(5) is not None and world.reads(1) is None
    assert world.state.find(Kind.KV, world.namespace, world.digest(1)) is entry  # on disk still
    world.state.check()


def test_a_state_of_a_sequence_is_gone_with_its_last_lease(world):
    """Nobody else can use it. Blocks stay for whoever comes, and a reader finishes."""
    pool = world.state.residents.pools[Kind.STATE]
    block, state = world.put(1, world.lease(1)), world.put(2, world.lease(1), kind=Kind.STATE)
    world.state.hold(world.lease(2), [state])
    assert pool.free == 1
    world.state.release(world.lease(1), None)
    assert pool.free == 1 and not state.dropped
    world.state.pin(state)
    world.state.release(world.lease(2), Kind.STATE)
    assert state.dropped and pool.free == 1  # not before the copy is over
    world.state.unpin(state)
    assert pool.free == 2
    assert world.state.find(Kind.KV, world.namespace, world.digest(1)) is block
    late = world.put(3, world.lease(3), kind=Kind.STATE)
    world.clock.advance(31)
    world.state.expire()
    assert late.dropped and pool.free == 2
    world.state.check()


def test_a_chain_loses_its_tail_first_and_the_least_used_goes_before_others(world):
    for number in (1, 2, 3):
        world.put(number, world.lease(1))
    world.put(9)
    world.save()
    world.state.release(world.lease(1), None)  # 9 could go before, so it goes first
    gone = []
    for number in (20, 21, 22):
        world.put(number)
        gone.append([n for n in (1, 2, 3, 9) if world.reads(n) is None])
    assert gone == [[9], [3, 9], [2, 3, 9]]
    world.save()
    world.state.residents.touch(world.state.find(Kind.KV, world.namespace, world.digest(1)))
    world.put(30)
    assert world.reads(1) == world.content(1) and world.reads(20) is None


def test_what_cannot_be_saved_goes_for_good_when_room_is_needed(world):
    for number in range(4):
        world.put(number)
    for entry in world.state.take_unsaved(1 << 30):
        world.state.not_saved(entry, None)
    assert world.put(10) is not None
    assert world.state.find(Kind.KV, world.namespace, world.digest(0)) is None
    assert world.state.take_unsaved(1 << 30)[0].facts.digest == world.digest(10)
    world.state.check()


def test_a_pinned_slot_is_not_given_away_even_if_its_object_is_dropped(world):
    entry = world.put(1)
    (writing,) = world.state.take_unsaved(1)
    assert writing is entry and entry.saving is Saving.WRITING
    world.state.drop(entry, erase=True)
    assert world.reads(1) is None and world.free == 3
    world.state.check()
    world.state.saved([(entry, DiskPlace(0, 7, 1))])
    assert world.free == 4 and world.state.disks.to_erase == [DiskPlace(0, 7, 1)]
    assert not world.state.disks.by_segment.get(0)
    world.state.check()


def test_doom_ends_only_what_is_damaged(world):
    entry = world.put(1)
    place = world.state.place(entry)
    assert not world.state.doom(place, world.namespace, world.digest(1))  # a false alarm
    assert not world.state.doom(place, world.namespace, world.digest(2))  # another object's
    assert not world.state.doom(place, bytes(31) + b"x", world.digest(1))
    assert world.reads(1) == world.content(1) and world.state.count.refused == 3
    world.arena.payload(*world.arena.locate(place.offset), world.size_bytes)[5] ^= 1
    assert world.reads(1) is None and world.state.doom(place, world.namespace, world.digest(1))
    assert world.state.find(Kind.KV, world.namespace, world.digest(1)) is None and world.free == 4
    assert not world.state.doom(place, world.namespace, world.digest(1))  # twice
    assert world.state.count.damaged == 1
    # damage of the arena copy of a saved object costs that copy only
    entry = world.put(2, world.lease(1))
    world.save()
    place = world.state.place(entry)
    world.arena.payload(*world.arena.locate(place.offset), world.size_bytes)[5] ^= 1
    assert world.state.doom(place, world.namespace, world.digest(2))
    assert entry.slot is None and entry.disk is not None and entry.leases == {world.lease(1)}
    world.state.check()


def test_a_segment_with_leased_objects_is_not_reused(world):
    entry = world.put(1, world.lease(1))
    world.save()
    assert world.state.plan_recycle(0, 4, 4) is None
    assert world.state.plan_recycle(1, 4, 4) == RecyclePlan((), ())
    world.state.release(world.lease(1), None)
    plan = world.state.plan_recycle(0, 4, 4)
    assert plan == RecyclePlan((), (entry,))
    assert world.state.recycle(0, plan) == (entry.key,)
    assert world.free == 4 and not world.state.objects and not world.state.disks.to_erase


def test_what_was_used_by_a_second_request_outlives_its_segment(world):
    entries = [world.put(number) for number in (1, 2, 3)]
    world.save()
    world.state.use(entries[0], again=False)  # its own request
    world.state.use(entries[1], again=True)
    world.state.use(entries[2], again=True)
    world.state.residents.leave(entries[2])  # on disk only
    plan = world.state.plan_recycle(0, 4, 4)
    assert plan == RecyclePlan((entries[1], entries[2]), (entries[0],))
    world.state.recycle(0, plan)
    # 2 is written again out of the arena; 3 is nobody's until its bytes have been written
    assert world.state.take_unsaved(1 << 30) == [entries[1]] and entries[1].disk is None
    assert world.state.find(Kind.KV, world.namespace, world.digest(3)) is None
    header = SlotHeader(entries[2].facts, entries[2].checksum, 5, 0, 2, entries[2].written_at_s)
    world.state.moved(header, DiskPlace(5, 0, 2))
    again = world.state.find(Kind.KV, world.namespace, world.digest(3))
    assert again.disk == DiskPlace(5, 0, 2) and not again.touched
    world.state.saved([(entries[1], DiskPlace(5, 1, 2))])
    assert not entries[1].touched and world.state.plan_recycle(5, 4, 4).keep == ()
    assert world.state.count.evictions[Eviction.MOVED] == 2
    assert world.state.count.evictions[Eviction.RECYCLED] == 1
    world.state.check()


def test_check_finds_a_book_that_is_wrong(world):
    entry = world.put(1)
    entry.slot = None
    with pytest.raises(StoreDamaged):
        world.state.check()


@pytest.mark.parametrize("written", ["nothing", "zeros", "another's"])
@pytest.mark.parametrize("saving", [Saving.WAITING, Saving.WRITING, Saving.GIVEN_UP])
def test_a_header_written_over_before_its_block_is_on_disk_is_made_anew(world, written, saving):
    """Its reader misses, and says so; the next one reads what was put."""
    entry = world.put(1)
    if saving is not Saving.WAITING:
        (taken,) = world.state.take_unsaved(1 << 30)
        assert taken is entry
    if saving is Saving.GIVEN_UP:
        world.state.not_saved(entry)
    assert entry.saving is saving
    place = world.state.place(entry)
    header = world.arena.header(*world.arena.locate(place.offset))
    header[:] = {
        "nothing": b"\xff" * len(header),
        "zeros": bytes(len(header)),
        "another's": pack_slot_header(world.facts(2), 5, ARENA_SEGMENT, 0, 1, 1),
    }[written]
    assert world.reads(1) is None
    assert world.state.doom(place, world.namespace, world.digest(1))
    assert world.reads(1) == world.content(1) and world.state.place(entry) == place
    assert world.state.count.damaged == 1
    assert not world.state.doom(place, world.namespace, world.digest(1))
    if saving is Saving.WRITING:
        world.state.saved([(entry, DiskPlace(0, 1, 1))])
    world.state.check()


def test_a_payload_written_over_with_its_header_ends_its_block(world):
    entry = world.put(1)
    place = world.state.place(entry)
    at = world.arena.locate(place.offset)
    world.arena.payload(*at, 1)[0] ^= 1
    world.arena.blank_header(*at)
    assert world.state.doom(place, world.namespace, world.digest(1))
    assert entry.dropped and world.reads(1) is None and world.free == 4
    world.state.check()


@pytest.mark.parametrize("leased", [False, True])
def test_a_second_copy_of_another_domain_does_not_become_the_first_ones(make_world, leased):
    """A slot is counted as the domain's that it was granted to."""
    gold = DomainShare("gold", guaranteed=0.25, most=0.75)
    world = make_world(64, StorePolicy(domain_shares=(gold,)))
    state, tag = world.state, domain_tag("gold")
    entry = world.put(1)
    world.save()
    state.residents.leave(entry)
    granted = state.granted.make(1, tag, 1)
    taken = state.residents.orders[Kind.KV].taken
    assert taken == [0, 1]
    place = world.write_granted(granted.slots[0], 1)
    facts = world.facts(1)._replace(domain=tag)
    lease = world.lease(1) if leased else None
    assert not commit_blocks(state, 1, [facts], [(granted.first, entry.checksum)], lease)
    assert entry.slot is None
    assert world.reads_at(place, 1) == (world.content(1) if leased else None)
    assert taken == [0, int(leased)]
    state.check()
    if leased:
        state.release(lease, None)
        assert taken == [0, 0]
    assert world.free == 64
    state.check()
