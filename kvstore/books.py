"""The store's books counted anew: what tests and a doubt ask of a whole state."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from headrace.kvstore.objects import PENDING
from headrace.kvstore.residents import StoreDamaged
from headrace.kvstore.settings import Kind

if TYPE_CHECKING:
    from headrace.kvstore.state import StoreState


def check_books(state: StoreState) -> None:
    """Count everything anew. Raises `StoreDamaged` naming what does not add up."""
    state.residents.check(state.objects.values())
    reserved = sum(pool.reserved for pool in state.residents.pools.values())
    granted = state.granted.slots()
    if reserved < len(state.reserving) + len(granted):  # loads reserve too
        raise StoreDamaged(f"{len(state.reserving)} reservations in {reserved} slots")
    if len(set(granted)) != len(granted):
        raise StoreDamaged("a slot was granted twice")
    _check_groups(state)
    held = {e for owner in state.leases.owners() for e in state.leases.entries(owner)}
    if held != {e for e in state.objects.values() if e.leases}:
        raise StoreDamaged("leases and leased objects differ")
    if state.leases.held != len(held):
        raise StoreDamaged(f"{state.leases.held} leased objects counted, {len(held)} found")
    kinds = Counter(entry.kind for entry in state.objects.values())
    if kinds != +Counter(state.by_kind):
        raise StoreDamaged(f"objects by kind: {state.by_kind} counted, {kinds} found")
    if state.pending != {e for e in state.objects.values() if e.saving in PENDING}:
        raise StoreDamaged("objects that wait to be saved and those counted differ")
    if any(e.pins < 0 for e in state.objects.values()):
        raise StoreDamaged("an object was unpinned twice")


def _check_groups(state: StoreState) -> None:
    """Every slot is counted as the domain's that has it; what is being loaded is counted, too."""
    residents, blocks = state.residents, state.residents.orders.get(Kind.KV)
    if blocks is None:
        return
    domains = [
        e.facts.domain for e in state.objects.values() if e.kind is Kind.KV and e.slot is not None
    ]
    found = Counter(residents.group(domain) for domain in [*domains, *state.granted.domains()])
    for group, taken in enumerate(blocks.taken):
        if found[group] > taken:
            raise StoreDamaged(f"group {group}: {taken} slots counted, {found[group]} found")
