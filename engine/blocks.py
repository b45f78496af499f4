"""The block pool: which block holds what, who refers to it, and which may be taken next.

A block is in exactly one of four places: *free*; *held* (referenced by at least one sequence);
*evictable* (nobody refers to it, its bytes are committed under a digest, least recently dropped
first out); *draining* (dropped while a fill was still writing into it). Not thread-safe.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence

from headrace.core.ids import Digest
from headrace.engine.errors import EngineDamaged


class BlockPool:
    """Counts references by digest. `on_take(block)` is called for every block handed out empty."""

    def __init__(self, n_blocks: int, on_take: Callable[[int], None] | None = None) -> None:
        self.n_blocks = n_blocks
        self._on_take = on_take
        self._free = list(range(n_blocks - 1, -1, -1))
        self._references = [0] * n_blocks
        self._digests: list[Digest | None] = [None] * n_blocks
        self._by_digest: dict[Digest, int] = {}
        self._evictable: OrderedDict[int, None] = OrderedDict()
        self._draining: set[int] = set()

    @property
    def n_available(self) -> int:
        """Blocks that `take` can hand out: free and evictable ones."""
        return len(self._free) + len(self._evictable)

    @property
    def n_evictable(self) -> int:
        return len(self._evictable)

    def references(self, block: int) -> int:
        return self._references[block]

    def digest(self, block: int) -> Digest | None:
        """The digest that the block is committed under, None if it is not."""
        return self._digests[block]

    def shared(self) -> dict[int, int]:
        """References of every block that has more than one."""
        return {block: n for block, n in enumerate(self._references) if n > 1}

    def resident_prefix(self, digests: Iterable[Digest]) -> int:
        """How many leading digests are resident. Changes nothing, not even the eviction order."""
        count = 0
        for digest in digests:
            if digest not in self._by_digest:
                break
            count += 1
        return count

    def resident(self, digests: Iterable[Digest]) -> tuple[list[int], int]:
        """The blocks of the longest resident prefix, and how many of them nobody refers to: to
        share one of those takes it from what `take` can hand out. Changes nothing."""
        blocks = []
        for digest in digests:
            if digest not in self._by_digest:
                break
            blocks.append(self._by_digest[digest])
        return blocks, sum(self._references[block] == 0 for block in blocks)

    def share(self, digest: Digest) -> int:
        """One more reference to the block with this digest. Raises `KeyError` if not resident."""
        block = self._by_digest[digest]
        if self._references[block] == 0:
            del self._evictable[block]
        self._references[block] += 1
        return block

    def take(self, count: int) -> list[int] | None:
        """`count` blocks with undefined bytes and one reference each, or None (and no change)."""
        if count > self.n_available:
            return None
        taken = [self._take_one() for _ in range(count)]
        if self._on_take is not None:
            for block in taken:
                self._on_take(block)
        return taken

    def commit(self, block: int, digest: Digest) -> bool:
        """Make the bytes of a held block findable. False: another block has this digest already
        (computed at the same time); this one stays a private copy and is freed when dropped.

        Raises `EngineDamaged` when the block is not held or has another digest."""
        if self._references[block] < 1 or self._digests[block] not in (None, digest):
            raise EngineDamaged(f"block {block} cannot be committed in the state it is in")
        if self._by_digest.setdefault(digest, block) != block:
            return False
        self._digests[block] = digest
        return True

    def drop(self, block: int, *, writer_inside: bool = False) -> None:
        """One reference less. The last one makes the block evictable if committed, else free;
        with `writer_inside` it drains until `drained` is told. Raises `EngineDamaged`."""
        if self._references[block] < 1:
            raise EngineDamaged(f"block {block} was dropped more often than it was taken")
        self._references[block] -= 1
        if self._references[block]:
            return
        if writer_inside:
            if self._digests[block] is not None:
                raise EngineDamaged(f"block {block} is committed and still being written")
            self._draining.add(block)
        elif self._digests[block] is not None:
            self._evictable[block] = None
        else:
            self._free.append(block)

    def drained(self, blocks: Iterable[int]) -> None:
        """The last fill of these dropped blocks ended; others are left alone."""
        for block in blocks:
            if block in self._draining:
                self._draining.remove(block)
                self._free.append(block)

    def check(self, held: Sequence[int]) -> None:
        """Raises `EngineDamaged` unless every block is in one place and `held` (every block of
        every lease, repeated as often as it is referenced) explains all references."""
        counts = [0] * self.n_blocks
        for block in held:
            counts[block] += 1
        if counts != self._references:
            wrong = [b for b in range(self.n_blocks) if counts[b] != self._references[b]]
            raise EngineDamaged(f"references do not match the leases of blocks {wrong[:8]}")
        places = [*self._free, *self._evictable, *self._draining]
        places += [block for block in range(self.n_blocks) if self._references[block]]
        if sorted(places) != list(range(self.n_blocks)):
            raise EngineDamaged("a block is in two places or in none")
        named = {b: d for b, d in enumerate(self._digests) if d is not None}
        if {d: b for b, d in named.items()} != self._by_digest or len(named) != len(
            self._by_digest
        ):
            raise EngineDamaged("the digests of blocks and the index over them differ")
        if any(block not in named for block in self._evictable):
            raise EngineDamaged("an evictable block has no digest")

    def _take_one(self) -> int:
        if self._free:
            block = self._free.pop()
        else:
            block, _ = self._evictable.popitem(last=False)
            digest = self._digests[block]
            assert digest is not None  # check() holds it
            del self._by_digest[digest]
            self._digests[block] = None
        self._references[block] = 1
        return block
