"""Everything that one admitted sequence holds of an engine: blocks, a state slot, a fill ticket."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from headrace.core.ids import Digest
from headrace.engine.blocks import BlockPool
from headrace.engine.errors import EngineDamaged
from headrace.engine.fills import FillGuard


class SlotPool:
    """State slots by number; `on_take(slot)` is called for every slot handed out."""

    def __init__(self, n_slots: int, on_take: Callable[[int], None] | None = None) -> None:
        self.n_slots = n_slots
        self._on_take = on_take
        self._free = list(range(n_slots - 1, -1, -1))

    @property
    def n_free(self) -> int:
        return len(self._free)

    def take(self) -> int | None:
        """A free slot with undefined rows, or None."""
        if not self._free:
            return None
        slot = self._free.pop()
        if self._on_take is not None:
            self._on_take(slot)
        return slot

    def give_back(self, slot: int) -> None:
        self._free.append(slot)

    def check(self, held: Sequence[int]) -> None:
        """Raises `EngineDamaged` unless free and held slots are all slots, each once."""
        if sorted([*self._free, *held]) != list(range(self.n_slots)):
            raise EngineDamaged("a state slot is held twice or lost")


@dataclass(frozen=True, slots=True)
class Resources:
    """What leases are cut from."""

    blocks: BlockPool
    slots: SlotPool
    guard: FillGuard

    def reclaim(self) -> None:
        """Free the blocks that drained since the last call."""
        self.blocks.drained(self.guard.take_left())


@dataclass(slots=True)
class Lease:
    """Reserved at once, closed exactly once. `blocks[i]` is block number i of the sequence; the
    first `n_shared` are referenced, not owned: this sequence never writes them."""

    resources: Resources
    blocks: list[int]
    n_shared: int
    slot: int  # -1 while the slot is given back
    ticket: int
    closed: bool = field(default=False)

    @classmethod
    def reserve(cls, resources: Resources, hits: Sequence[Digest], n_blocks: int) -> Lease | None:
        """Shares the resident prefix of `hits` and takes the rest of `n_blocks` and a slot; the
        ticket is for the hits that were not shared. None, and no block or slot taken, when there
        is no room now.

        Only a *prefix* is shared: a block behind a gap gets a private copy, so that a fill that
        fails (which lowers the write floor to that block) never asks us to write a shared one."""
        resources.reclaim()
        pool = resources.blocks
        if resources.slots.n_free == 0:
            return None
        n_shared = pool.resident_prefix(hits)
        shared = [pool.share(digest) for digest in hits[:n_shared]]
        taken = pool.take(n_blocks - n_shared)
        if taken is None:
            for block in reversed(shared):
                pool.drop(block)
            return None
        slot = resources.slots.take()
        assert slot is not None  # n_free was looked at above
        ticket = resources.guard.open(taken[: len(hits) - n_shared])
        return cls(resources, shared + taken, n_shared, slot, ticket)

    @staticmethod
    def missing(
        resources: Resources, hits: Sequence[Digest], n_blocks: int
    ) -> tuple[int, int, frozenset[int]]:
        """(slots, blocks) that would have to become free for `reserve`, and the blocks that it
        would share, which help nobody by becoming free; (0, 0, _): there is room."""
        resources.reclaim()
        shared, n_evictable = resources.blocks.resident(hits)
        free = resources.blocks.n_available - n_evictable
        n_slots = int(resources.slots.n_free == 0)
        return n_slots, max(0, n_blocks - len(shared) - free), frozenset(shared)

    def make_private(self, first_block: int) -> bool:
        """Replace shared blocks from `first_block` on by own ones with undefined bytes, because
        this sequence is about to write them. False, and nothing changed, when there is no room."""
        wanted = self.n_shared - first_block
        if wanted <= 0:
            return True
        own = self.resources.blocks.take(wanted)
        if own is None:
            return False
        for index, block in enumerate(own, start=first_block):
            self.resources.blocks.drop(self.blocks[index])
            self.blocks[index] = block
        self.n_shared = first_block
        return True

    def commit(self, index: int, digest: Digest) -> None:
        """Block `index` is complete and will not be written again: let others find it."""
        self.resources.blocks.commit(self.blocks[index], digest)

    def give_slot_back(self) -> None:
        """The slot alone; blocks stay. Raises `EngineDamaged` when there is none."""
        if self.slot < 0:
            raise EngineDamaged("a lease without a slot gave one back")
        self.resources.slots.give_back(self.slot)
        self.slot = -1

    def take_slot(self) -> bool:
        """A slot again, with undefined rows; False when none is free."""
        slot = self.resources.slots.take()
        if slot is not None:
            self.slot = slot
        return slot is not None

    def close(self) -> None:
        """Give everything back. Blocks with a fill in flight drain first. Raises `EngineDamaged`
        when called twice."""
        if self.closed:
            raise EngineDamaged(f"the lease of slot {self.slot} was closed twice")
        self.closed = True
        busy = self.resources.guard.close(self.ticket)
        # Last block first: the end of a chain is of no use without its beginning, so it must be
        # evicted first.
        for block in reversed(self.blocks):
            self.resources.blocks.drop(block, writer_inside=block in busy)
        if self.slot >= 0:
            self.resources.slots.give_back(self.slot)
