"""Which blocks are being computed on this replica: equal rows of two prompts are run once.

Before it looks into the store a job *claims* all blocks of its prompt, unless another one claimed
one of them: then it waits for that one, holding no claim, no slot and no place in line. What it
finds stored, and what it has sealed, it lets go. So who waits, waits for one that began earlier and
itself waits for nobody: no cycle.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from headrace.core.ids import Digest, JobKey

LEAST_WAIT_S = 1.0  # however few rows are ahead: they must be sealed too


def block_to_await(digests: Sequence[Digest], computers: Mapping[Digest, JobKey]) -> Digest | None:
    """The block of a prompt to wait for before any of its rows is run; None when nobody computes
    one.

    `digests` are those of its blocks in order. It is the last of the first blocks in a row that one
    job computes: when that is sealed, all before it are."""
    last: Digest | None = None
    computer: JobKey | None = None
    for digest in digests:
        owner = computers.get(digest)
        if computer is not None and owner != computer:
            break
        if owner is not None:
            last, computer = digest, owner
    return last


def wait_bound_s(rows_ahead: float, rows_per_s: float, factor: float, unmeasured_s: float) -> float:
    """How long to wait for blocks before which `rows_ahead` rows are to be run: the predicted time
    of these times `factor`, `unmeasured_s` while the replica has measured no rate."""
    if not factor:
        return 0.0
    if rows_per_s <= 0:
        return unmeasured_s
    return max(LEAST_WAIT_S, factor * rows_ahead / rows_per_s)


@dataclass(eq=False)
class Underway:
    """The claims of one replica. Mutable, owned by the role's loop."""

    computers: dict[Digest, JobKey] = field(default_factory=dict)
    _claims: dict[JobKey, set[Digest]] = field(default_factory=dict)
    _waiting: dict[Digest, list[asyncio.Event]] = field(default_factory=dict)

    def claim(self, key: JobKey, digests: Sequence[Digest]) -> None:
        """`key` computes these if need be; those that another one claimed stay that one's."""
        mine = self._claims.setdefault(key, set())
        for digest in digests:
            if self.computers.setdefault(digest, key) == key:
                mine.add(digest)

    def sealed(self, key: JobKey, digests: Sequence[Digest]) -> None:
        """These can be opened now."""
        mine = self._claims.get(key, set())
        self._let_go(mine.intersection(digests))
        mine.difference_update(digests)

    def ended(self, key: JobKey) -> None:
        """Nothing more comes from `key`, whatever it claimed. Idempotent."""
        self._let_go(self._claims.pop(key, set()))

    async def wait(self, digest: Digest, bound_s: float) -> bool:
        """Return when nobody computes `digest` any more; False when that took `bound_s`."""
        if digest not in self.computers:
            return True
        over = asyncio.Event()
        self._waiting.setdefault(digest, []).append(over)
        try:
            async with asyncio.timeout(bound_s):
                await over.wait()
        except TimeoutError:
            return False
        finally:
            waiting = self._waiting.get(digest, [])
            if over in waiting:
                waiting.remove(over)
            if not waiting:
                self._waiting.pop(digest, None)
        return True

    def _let_go(self, digests: set[Digest]) -> None:
        for digest in digests:
            del self.computers[digest]
            for over in self._waiting.pop(digest, ()):
                over.set()
