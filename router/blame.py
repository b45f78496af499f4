"""Which request may have killed a replica, and how the innocent are told from it.

A lost replica is charged to every request that it had and that had no token since: one loss an
attempt, however many replicas went with it. Who has `crashes` losses in a row is guilty if the last
replica had nobody else. Where it had, nobody can tell who did it: whoever has so many runs *apart*
from then on, on replicas that no other such request is on, and is guilty if one of those is lost.
A token acquits (docs/decisions/0014).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field


@dataclass(eq=False, slots=True)
class Suspicion:
    """What one request is suspected of. Mutable, owned by its ticket.

    `had_by` holds the keys of replicas that were given it since its last token and that still
    live, but for those that gave it up themselves or have done their part."""

    had_by: set[str] = field(default_factory=set)
    losses: int = 0  # attempts in a row, without a token between them, that lost a replica
    apart: bool = False  # may share no replica with another one that is apart
    guilty: bool = False
    _charged: bool = False  # this attempt's loss is in `losses`

    def given(self, replica: str) -> None:
        """Call it before the job is sent: a job may kill by arriving."""
        self.had_by.add(replica)

    def given_back(self, replica: str) -> None:
        """The replica lives on without it: what it dies of later is something else."""
        self.had_by.discard(replica)

    def begins_anew(self) -> None:
        """Another attempt: its loss counts by itself."""
        self._charged = False

    def acquit(self, replica: str | None) -> bool:
        """A token came from `replica`. Returns whether the request was apart."""
        was_apart = self.apart
        self.had_by = {replica} if replica is not None else set()
        self.losses = 0
        self.apart = self.guilty = self._charged = False
        return was_apart

    def charge(self) -> None:
        self.losses += not self._charged
        self._charged = True


def charge_loss(
    replica: str, suspicions: Iterable[Suspicion], crashes: int, *, told: bool = False
) -> None:
    """`replica` is gone. Marks who is guilty, or who is to run apart; the loss of someone guilty is
    charged to nobody else. `told`: it was told to end, which is nobody's fault."""
    had = [one for one in suspicions if replica in one.had_by]
    for one in had:
        one.given_back(replica)
    if told:
        return
    found = [one for one in had if one.apart or len(had) == 1]
    for one in found or had:
        one.charge()
        if one.losses >= crashes:
            one.guilty, one.apart = bool(found), True
