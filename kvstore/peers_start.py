"""Wires a store to others: it serves them, tells the index where, and asks them in turn."""

from __future__ import annotations

import contextlib

from headrace.core.role import RoleSettings
from headrace.kvstore.elsewhere import Elsewhere
from headrace.kvstore.mounts import Mounts
from headrace.kvstore.peers import Peers
from headrace.kvstore.peers_serve import PeerServer
from headrace.kvstore.publisher import Publisher
from headrace.kvstore.redis_link import RedisLink
from headrace.kvstore.settings import StoreSettings
from headrace.kvstore.shared import SharedFolder
from headrace.kvstore.store import Store


async def start_peers(
    stack: contextlib.AsyncExitStack,
    role: RoleSettings,
    settings: StoreSettings,
    store: Store,
    publisher: Publisher,
    uid: bytes,
) -> None:
    """Ended by `stack`. Raises `ConfigError` when `peer_listen` cannot be had."""
    clock, wire = store.state.clock, role.deployment.wire
    link = RedisLink(role.redis_url, settings.index_deadline_s, clock)
    elsewhere = Elsewhere(link, settings, clock, uid)
    folders = [SharedFolder(path) for path in settings.shared_directories]
    if folders:
        mounts = Mounts(link, folders, role.deployment.leases.member_beat_s)
        stack.push_async_callback(mounts.close)
        await mounts.start()
        elsewhere.folders = mounts.by_epoch
    peers = store.opening.peers = Peers(store.state, settings, elsewhere, role.token, wire)
    stack.push_async_callback(peers.close)
    if not settings.peer_listen:
        return
    store.door = PeerServer(store.state, store.loader, role.token, wire)
    stack.push_async_callback(store.door.close)
    publisher.peer_address = await store.door.start(settings.peer_listen)
