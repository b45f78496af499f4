"""A store's own account of one moment."""

from __future__ import annotations

from typing import Protocol

from headrace.kvstore.locking import Locked
from headrace.kvstore.opening import Opening
from headrace.kvstore.peers_serve import PeerServer
from headrace.kvstore.publisher import Publisher
from headrace.kvstore.segments import SegmentFiles
from headrace.kvstore.settings import Kind, StoreStat
from headrace.kvstore.state import StoreState
from headrace.kvstore.writer import Writer


class Accounted(Protocol):
    """The parts of a `Store` that are counted."""

    state: StoreState
    opening: Opening
    door: PeerServer | None
    connections: int
    arena_lock: Locked


def take_stat(
    store: Accounted, files: SegmentFiles, publisher: Publisher, writer: Writer
) -> StoreStat:
    """As of now; nothing is changed."""
    state, count, peers = store.state, store.state.count, store.opening.peers
    pools = state.residents.pools.values()
    return StoreStat(
        boot=state.boot,
        blocks=state.by_kind[Kind.KV],
        windows=state.by_kind[Kind.SWA],
        pictures=state.by_kind[Kind.MM],
        states=state.by_kind[Kind.STATE],
        arena_slots=sum(pool.total for pool in pools),
        arena_free=sum(pool.free for pool in pools),
        arena_reserved=sum(pool.reserved for pool in pools) - state.granted.twins,
        arena_resident=sum(pool.resident for pool in pools) + state.granted.twins,
        arena_bytes=state.residents.payload_bytes,
        arena_lock=store.arena_lock,
        ssd_objects=state.disks.objects,
        ssd_bytes=state.disks.payload_bytes,
        ssd_segments=len(files.segments),
        ssd_segments_free=sum(s.header.kind is None for s in files.segments),
        pending=len(state.pending),
        leases=len(state.leases),
        leased_objects=state.leases.held,
        reservations=len(state.reserving),
        granted=len(state.granted),
        connections=store.connections,
        hits=count.hits,
        misses=count.misses,
        damaged=count.damaged,
        dropped=count.dropped,
        unsaved=count.unsaved,
        refused=count.refused + state.leases.late,
        lapsed=state.leases.lapsed,
        loads=count.loads,
        prefetched=count.prefetched,
        writes=count.writes,
        evicted=count.evicted,
        recycled=writer.recycled,
        write_errors=writer.errors,
        index=publisher.condition,
        index_unlisted=publisher.unlisted,
        index_errors=publisher.errors,
        peer_fetched=peers.count.fetched if peers else 0,
        peer_failed=peers.count.failed if peers else 0,
        peer_sent=store.door.sent if store.door else 0,
    )
