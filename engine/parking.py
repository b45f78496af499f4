"""A sequence leaves its slot in the middle of its answer and goes on later: no row runs twice.

    decoding --hold--> held --park--> parked      hold copies out all that is not in blocks
        ^---- unhold ----'                        park gives the slot back, a release blocks too
        ^---- unpark ----------------'            after a release: admit, then Engine.adopt

Who gives way, and when, is `give_way.py`; where the copied bytes go is the owner's business.
"""

from __future__ import annotations

from collections.abc import Mapping

from headrace.core.chain import BLOCK_TOKENS
from headrace.core.ids import Digest, JobKey
from headrace.engine.admission import blocks_to_reserve
from headrace.engine.give_way import Holder, Room
from headrace.engine.jobs import Job
from headrace.engine.lease import Lease
from headrace.engine.runner import Runner
from headrace.engine.scheduler import Scheduler
from headrace.engine.sequence import DigestChain, Sequence, SequenceEvent, SequenceState
from headrace.model import (
    KvState,
    SequenceBytes,
    StateError,
    pack_state,
    restore_state,
    unpack_state,
)

Buffer = bytes | bytearray | memoryview


class Parking:
    """An engine's sequences as they stop and go on. From the engine's thread, between two steps."""

    def __init__(self, state: KvState, runner: Runner, scheduler: Scheduler) -> None:
        self._state = state
        self._runner = runner
        self._scheduler = scheduler

    def export(self, sequence: Sequence) -> bytes:
        """Everything of a sequence beyond its complete blocks, and its newest token."""
        length_tokens, slot = sequence.next_row, sequence.lease.slot
        block = open_block(sequence, length_tokens)
        return pack_state(self._state, slot, length_tokens, sequence.ids[-1], block)

    def hold(self, key: JobKey) -> bytes | None:
        """No step runs a decoding sequence from now on, and everything of it beyond its complete
        blocks is copied out. Slot and blocks stay until `unhold`, `park` or a release.

        None: it has ended meanwhile. Raises `ValueError` for one that does not decode yet or is
        held already."""
        sequence = hold(self._scheduler, key)
        return None if sequence is None else self.export(sequence)

    def unhold(self, key: JobKey) -> bool:
        """Go on where `hold` stopped, as if nothing had been. False: the sequence is gone. Raises
        `ValueError` for one that is not held."""
        sequence = self._scheduler.sequence(key)
        if sequence is not None and sequence.state is not SequenceState.HELD:
            raise ValueError(f"{key}: not held")
        return sequence is not None and unpark(self._scheduler, sequence)

    def park(self, key: JobKey) -> bool:
        """Give the slot of a held sequence to others. Its blocks stay reserved, so it can go on
        whenever a slot is free. False: the sequence is gone. Raises `ValueError` for one that is
        not held."""
        sequence = self._scheduler.sequence(key)
        if sequence is None:
            return False
        if sequence.state is not SequenceState.HELD:
            raise ValueError(f"{key}: only a sequence that is held can be parked")
        slot = sequence.lease.slot
        park(sequence)
        self._runner.close(slot)
        return True

    def unpark(self, key: JobKey, payload: Buffer) -> bool:
        """Go on where `hold` stopped, in another slot. False: no slot is free now. Raises
        `ValueError` for a sequence that is not parked or a state of another moment, `StateError`
        for other bytes; nothing changed then."""
        found, sequence = unpack_state(payload), self._scheduler.sequence(key)
        if sequence is None or sequence.state is not SequenceState.PARKED:
            raise ValueError(f"{key}: not parked")
        check_moment(found, sequence.next_row, sequence)
        if not unpark(self._scheduler, sequence):
            return False
        lease, block = sequence.lease, open_block(sequence, found.slot.length_tokens)
        try:
            restore_state(self._state, lease.slot, found, block)
        except StateError:
            hold(self._scheduler, key)
            park(sequence)
            raise
        self._runner.open(lease.slot, sequence.ids, lease.blocks, sequence.request.images, {})
        return True

    def complete_blocks(self, key: JobKey) -> tuple[tuple[Digest, memoryview], ...]:
        """Digest and zero-copy bytes of the sequence's blocks in which every row ran, in order;
        () when it is gone. Valid until its release; CPU only."""
        sequence = self._scheduler.sequence(key)
        if sequence is None:
            return ()
        blocks = sequence.lease.blocks[: sequence.next_row // BLOCK_TOKENS]
        return tuple(
            (sequence.digests[index], self._state.block_view(block))
            for index, block in enumerate(blocks)
        )

    def room(self, wanted: Job | None, may_give_way: Mapping[JobKey, int]) -> Room:
        """As the function of this name."""
        return room(self._scheduler, wanted, may_give_way)


def room(scheduler: Scheduler, wanted: Job | None, may_give_way: Mapping[JobKey, int]) -> Room:
    """What an admission of `wanted` lacks now (None: a slot alone), and what those hold who may
    give way, apart from blocks that `wanted` would share: key -> tokens since it has its slot, in
    order of arrival. Who neither decodes nor is parked is left out."""
    resources = scheduler.resources
    n_slots, n_blocks, shares = int(resources.slots.n_free == 0), 0, frozenset[int]()
    if wanted is not None:
        request = wanted.request
        digests = DigestChain(request, request.token_ids + wanted.generated_ids)
        hits = [digests[index] for index in range(wanted.hit_blocks)]
        reserved = blocks_to_reserve(request, scheduler.half)
        n_slots, n_blocks, shares = Lease.missing(resources, hits, reserved)
    holders = []
    for key, since_tokens in may_give_way.items():
        sequence = scheduler.sequence(key)
        if sequence is not None and sequence.state in (
            SequenceState.DECODING,
            SequenceState.PARKED,
        ):
            runs = sequence.state is SequenceState.DECODING
            blocks = frozenset(sequence.lease.blocks) - shares
            holders.append(Holder(key, blocks, runs, since_tokens))
    return Room(n_slots, n_blocks, tuple(holders), resources.blocks.shared())


def hold(scheduler: Scheduler, key: JobKey) -> Sequence | None:
    """Take a decoding sequence out of the steps. None when it has ended meanwhile. Raises
    `ValueError` for one that does not decode yet or is held already."""
    sequence = scheduler.sequence(key)
    if sequence is None or sequence.state in (SequenceState.FINISHED, SequenceState.FAILED):
        scheduler.totals.late_events += 1
        return None
    if sequence.state is not SequenceState.DECODING:
        raise ValueError(f"{key}: only a sequence that decodes can be held")
    sequence.on(SequenceEvent.HOLD)
    scheduler.rest(sequence)
    return sequence


def park(sequence: Sequence) -> None:
    """Give the slot of a held sequence back."""
    sequence.on(SequenceEvent.PARK)
    sequence.lease.give_slot_back()


def unpark(scheduler: Scheduler, sequence: Sequence) -> bool:
    """A held or parked sequence runs again, behind the others. False when it has no slot and none
    is free."""
    if sequence.lease.slot < 0 and not sequence.lease.take_slot():
        return False
    sequence.on(SequenceEvent.UNPARK)
    scheduler.rejoin(sequence)
    return True


def open_block(sequence: Sequence, length_tokens: int) -> int | None:
    """The block that a sequence of `length_tokens` rows has begun and not filled."""
    whole, begun = divmod(length_tokens, BLOCK_TOKENS)
    return sequence.lease.blocks[whole] if begun else None


def check_moment(found: SequenceBytes, length_tokens: int, sequence: Sequence) -> None:
    """Raises `ValueError` for a state of other than `length_tokens` rows, or another newest
    token."""
    if (found.slot.length_tokens, found.anchor) != (length_tokens, sequence.ids[-1]):
        raise ValueError(f"{sequence.key}: not the state that was parked")
