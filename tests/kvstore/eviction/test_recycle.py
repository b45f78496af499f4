"""What a reused segment keeps: random forests of blocks and windows, against plain definitions."""

from __future__ import annotations

import hashlib

from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from headrace.core.ids import Digest, JobKey, RequestId
from headrace.core.states import Visibility
from headrace.kvstore.eviction import Guarantees, plan_recycle, with_descendants
from headrace.kvstore.kin import Kin
from headrace.kvstore.layout import NO_DIGEST, ObjectFacts
from headrace.kvstore.objects import DiskPlace, Entry, Saving, object_key
from headrace.kvstore.settings import Kind

NS = bytes(32)
SLOT = 4096


def entry(number: int, parent: Entry | None, segment: int, domain: bytes = bytes(16)) -> Entry:
    digest = Digest(hashlib.sha256(b"%d" % number).digest())
    block = 0 if parent is None else parent.facts.block + 1
    above = NO_DIGEST if parent is None else parent.facts.digest
    facts = ObjectFacts(Kind.KV, NS, digest, above, block, domain, 100)
    made = Entry(object_key(Kind.KV, NS, digest), facts, 0, 0, Visibility.DURABLE, Saving.SAVED)
    made.disk = DiskPlace(segment, number, 1)
    return made


def plan(entries, kin, *, must_stay=lambda e: False, guarantees=None, must_room=99, room=99):
    return plan_recycle(
        entries,
        kin.children,
        must_stay=must_stay,
        returns=lambda e: e.touched,
        group_of=lambda e: e.facts.domain[0],
        guarantees=guarantees or Guarantees({}),
        slot_bytes=SLOT,
        must_room=must_room,
        room=room,
    )


def chain(*segments: int) -> tuple[list[Entry], Kin]:
    made: list[Entry] = []
    kin = Kin()
    for number, segment in enumerate(segments):
        made.append(entry(number, made[-1] if made else None, segment))
        kin.add(made[-1])
    return made, kin


def test_an_unused_chain_goes_with_its_tail_in_other_segments():
    blocks, kin = chain(0, 0, 1, 2)
    made = plan(blocks[:2], kin)
    assert made.keep == () and made.drop == tuple(blocks)
    made = plan(blocks[2:3], kin)
    assert made.drop == tuple(blocks[2:])  # the head does not go with it


def test_what_a_used_block_hangs_on_stays():
    blocks, kin = chain(0, 0, 1)
    blocks[2].touched = True
    made = plan(blocks[:2], kin)
    assert made.keep == tuple(blocks[:2]) and made.drop == ()


def test_heads_stay_where_there_is_not_room_for_all():
    blocks, kin = chain(0, 0, 0, 0, 1)
    for block in blocks:
        block.touched = True
    made = plan(blocks[:4], kin, room=2)
    assert made.keep == tuple(blocks[:2]) and made.drop == tuple(blocks[2:])


def test_in_use_or_too_much_that_must_stay_means_another_segment():
    blocks, kin = chain(0, 0, 1)
    blocks[0].pins = 1
    assert plan(blocks[:2], kin) is None
    blocks[0].pins = 0
    blocks[2].leases = {JobKey(RequestId("r"), 0)}
    assert plan(blocks[:2], kin).keep == tuple(blocks[:2])  # a held tail needs its heads
    assert plan(blocks[:2], kin, must_room=1) is None
    assert plan(blocks[2:], kin) is None


def test_a_group_keeps_what_was_guaranteed_heads_first():
    blocks, kin = chain(0, 0, 0, 0)
    made = plan(blocks, kin, guarantees=Guarantees({0: 2 * SLOT + 100}))
    assert made.keep == tuple(blocks[:2]) and made.drop == tuple(blocks[2:])
    assert plan(blocks, kin, guarantees=Guarantees({0: 0}), must_room=3) is None


def test_a_chain_of_ten_thousand_blocks_costs_no_recursion():
    blocks, kin = chain(*([0] * 10_000))
    blocks[-1].touched = True
    assert plan(blocks, kin, must_room=10_000, room=10_000).keep == tuple(blocks)
    assert len(with_descendants(blocks[:1], kin.children)) == 10_000


FORESTS = st.lists(
    st.tuples(
        st.integers(-1, 30),  # parent, by number
        st.integers(0, 3),  # segment
        st.sampled_from(["", "", "", "touched", "touched", "leased", "pinned", "must"]),
        st.integers(0, 1),  # group
    ),
    min_size=1,
    max_size=30,
)


def forest(nodes) -> tuple[list[Entry], Kin, set[Entry]]:
    made: list[Entry] = []
    kin = Kin()
    must: set[Entry] = set()
    for number, (above, segment, state, group) in enumerate(nodes):
        parent = made[above] if 0 <= above < number else None
        domain = parent.facts.domain if parent else bytes([group] * 16)
        one = entry(number, parent, segment, domain)
        one.touched = state == "touched"
        one.pins = state == "pinned"
        if state == "leased":
            one.leases = {JobKey(RequestId("r"), 0)}
        if state == "must":
            must.add(one)
        made.append(one)
        kin.add(one)
    return made, kin, must


@hypothesis_settings(max_examples=500, deadline=None)
@given(
    nodes=FORESTS,
    room=st.integers(0, 8),
    more=st.integers(0, 4),
    left=st.integers(0, 10),
)
def test_properties_of_every_plan(nodes, room, more, left):
    made, kin, must = forest(nodes)
    members = [e for e in made if e.disk.segment == 0]
    guarantees = Guarantees({1: left * SLOT})
    result = plan(
        members,
        kin,
        must_stay=must.__contains__,
        guarantees=guarantees,
        room=room,
        must_room=room + more,
    )
    held = {e for e in made if e.pins or e.leases}
    if any(e in held for e in members):
        assert result is None
        return
    protected = {e for e in members if set(with_descendants([e], kin.children)) & (held | must)}
    if result is None:
        # protected ones, or those of a guaranteed group, did not fit
        assert len(protected) + sum(e.facts.domain[0] == 1 for e in members) > room + more
        return
    keep, drop = set(result.keep), set(result.drop)
    assert not keep & drop and len(keep) == len(result.keep) and len(drop) == len(result.drop)
    assert set(members) <= keep | drop and keep <= set(members)
    assert protected <= keep and not drop & (held | must)
    assert len(keep) <= room + more
    # no head without its tail: what hangs on a dropped object is dropped
    assert drop == set(with_descendants(drop, kin.children))
    # and nothing else of other segments is
    gone = [e for e in members if e in drop]
    assert drop == set(with_descendants(gone, kin.children))
    # a group loses no more of this segment than it may
    assert sum(e.facts.domain[0] == 1 for e in gone) <= left
    # kept for their use alone: at most `room`, unless nothing of them may go
    wanted = {e for e in members if any(d.touched for d in with_descendants([e], kin.children))}
    if left >= len(members):
        assert len(keep) <= max(room, len(protected))
        assert keep <= protected | wanted
        if len(protected | wanted) <= room:
            assert keep == protected | wanted
    order = {e: n for n, e in enumerate(result.keep)}
    parents = {e.facts.digest: e for e in made}
    for e in result.keep:
        head = parents.get(e.facts.parent)
        assert head not in order or order[head] < order[e]
