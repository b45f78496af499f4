"""The store process: opens the directory, serves the socket, ends in order."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import itertools
import logging
import os
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from headrace.core import faults
from headrace.core.card import Member, Role
from headrace.core.clock import SYSTEM_CLOCK, Clock
from headrace.core.errors import ConfigError
from headrace.core.ids import BootId
from headrace.core.link import Link, open_link, parse_address, serve_links
from headrace.core.role import Ready, RoleSettings
from headrace.core.states import ReplicaState
from headrace.kvstore.answers import stored_chain
from headrace.kvstore.arena import create_arena, plan_regions
from headrace.kvstore.evicting import warn_of_eviction
from headrace.kvstore.files import FileCalls, lock_directory
from headrace.kvstore.graves import Graves
from headrace.kvstore.lives import epoch_of, new_life
from headrace.kvstore.locking import lock_arena
from headrace.kvstore.members import Beat, MemberBoard
from headrace.kvstore.messages import STORE_MESSAGES
from headrace.kvstore.metrics import Snapshot, StoreMetrics
from headrace.kvstore.peers_start import start_peers
from headrace.kvstore.pins import PinBook
from headrace.kvstore.publisher import Publisher
from headrace.kvstore.redis_link import RedisLink
from headrace.kvstore.salts import SaltBook
from headrace.kvstore.segments import SegmentFiles
from headrace.kvstore.sessions import Session
from headrace.kvstore.settings import StoreSettings
from headrace.kvstore.state import StoreState
from headrace.kvstore.store import Store
from headrace.kvstore.writer import Writer

log = logging.getLogger(__name__)
_EXPIRE_S = 0.2  # how often leases and reservations are looked through
_MANY = 10_000  # objects found at start that the collector need not look at again
_READ_THREADS = 8  # some verify while others keep the disk busy
_WRITE_THREADS = 4
_SCRAPE_S = 2.0  # a scrape gets what there is by then
_LEAVE_S = 1.0  # for clients to see that the store ends


async def run_store(
    role: RoleSettings,
    store: StoreSettings,
    *,
    ready: Ready | None = None,
    stop: asyncio.Event | None = None,
    clock: Clock = SYSTEM_CLOCK,
    calls: FileCalls | None = None,
) -> None:
    """Serve one host's store on `role.listen` (a unix socket) until `stop` is set.

    At `stop` what clients have put is still taken, and sealed objects get `drain_s` to become
    durable; when cancelled neither. Raises `ConfigError` when another process owns the directory or
    socket, or memory or disk cannot be had. Redis may be absent, empty or frozen at any time."""
    faults.arm_from_environment(loopback_only=role.on_loopback)
    scheme, path, _ = parse_address(role.listen)
    if scheme != "unix":
        raise ConfigError(f"listen: a store is served on unix:///path, got {scheme}")
    stop = stop or asyncio.Event()
    async with contextlib.AsyncExitStack() as stack:
        lock = lock_directory(store.directory, calls)
        stack.callback(os.close, lock)
        await _refuse_second(role, path)
        SaltBook.ensure(store.directory)
        regions = plan_regions(store)
        descriptor, arena = await asyncio.to_thread(create_arena, regions)
        stack.callback(os.close, descriptor)
        leases = role.deployment.leases
        files = SegmentFiles(store, calls)
        stack.callback(files.close)
        await asyncio.to_thread(files.open)
        boot = new_life(files.uid)
        state = StoreState(
            arena,
            boot,
            clock,
            lease_s=leases.handoff_s,
            reserve_s=leases.connection_reserve_s,
            policy=store,
            ssd_bytes=store.ssd_bytes,
        )
        await asyncio.to_thread(_take_up, files, state)
        writing = stack.enter_context(ThreadPoolExecutor(_WRITE_THREADS, "store-write"))
        reading = stack.enter_context(ThreadPoolExecutor(_READ_THREADS, "store-read"))
        redis_url, epoch = role.redis_url, epoch_of(boot)
        publisher = Publisher(state, store, leases, clock, redis_url, files.uid, epoch)
        writer = Writer(state, files, publisher, store, writing)
        pins = _take_up_pins(store, state, clock)
        service = Store(state, files, publisher, writer, reading, pins, store)
        service.arena_lock = await asyncio.to_thread(lock_arena, arena, store.lock_memory)
        if role.redis_url:
            link = RedisLink(role.redis_url, store.index_deadline_s, clock)
            service.graves = Graves(link, leases, clock, store.forget_stores_s)
            stack.push_async_callback(service.graves.close)
            looking = asyncio.create_task(warn_of_eviction(link), name="store-eviction")
            stack.callback(looking.cancel)
        if (store.peer_listen or store.shared_directories) and role.redis_url:
            await start_peers(stack, role, store, service, publisher, files.uid)
        _serve_metrics(stack, service, store)
        await _serve(role, store, service, publisher, writer, descriptor, ready, stop)


def _take_up_pins(settings: StoreSettings, state: StoreState, clock: Clock) -> PinBook:
    quota_bytes = int(settings.pin_share * settings.ssd_bytes)
    chain = partial(stored_chain, state)
    pins = PinBook(settings.directory, quota_bytes, chain, clock.wall_s)
    pins.load()
    state.disks.must_stay = lambda entry: pins.holds(entry.key)
    return pins


def _serve_metrics(stack: contextlib.AsyncExitStack, store: Store, settings: StoreSettings) -> None:
    """Answer scrapes in a thread, if there is a port; what they show is taken on this loop."""
    if not settings.metrics_port:
        return
    loop = asyncio.get_running_loop()

    async def now() -> Snapshot:
        return store.snapshot()

    def take() -> Snapshot | None:
        asked = asyncio.run_coroutine_threadsafe(now(), loop)
        try:
            return asked.result(_SCRAPE_S)
        except (TimeoutError, RuntimeError):
            return None

    port = settings.metrics_port
    try:
        server, thread = StoreMetrics(take, settings.domain_shares).serve(port)
    except OSError as error:
        raise ConfigError(
            f"metrics_port: port {port} of 127.0.0.1 cannot be had ({error.strerror})"
        ) from None

    def end() -> None:
        server.shutdown()
        server.server_close()
        thread.join(_SCRAPE_S)

    # In a thread, because a scrape under way waits for this loop.
    stack.push_async_callback(asyncio.to_thread, end)


def _take_up(files: SegmentFiles, state: StoreState) -> None:
    began_s = time.monotonic()
    # A collector that walks a million living objects again and again costs a quarter of the start,
    # and later stops every request for as long as one walk takes: what is found here stays.
    collects = gc.isenabled()
    gc.disable()
    try:
        for header, place in files.scan():
            state.adopt(header, place)
        if len(state.objects) > _MANY:
            gc.freeze()
    finally:
        if collects:
            gc.enable()
    log.info(
        "found %d objects in %d segments in %.2f s",
        len(state.objects),
        len(files.segments),
        time.monotonic() - began_s,
    )


async def _refuse_second(role: RoleSettings, path: str) -> None:
    """Raise `ConfigError` if somebody serves the socket; a file left by a dead one is removed."""
    if not os.path.exists(path):
        return
    try:
        link = await open_link(role.listen, STORE_MESSAGES, role.token)
    except ConnectionError:
        os.unlink(path)
        return
    link.abort()
    raise ConfigError("listen: another store already serves this socket")


async def _serve(
    role: RoleSettings,
    settings: StoreSettings,
    store: Store,
    publisher: Publisher,
    writer: Writer,
    descriptor: int,
    ready: Ready | None,
    stop: asyncio.Event,
) -> None:
    numbers = itertools.count(1)
    links: set[Link] = set()
    limits = role.deployment.wire

    async def on_link(link: Link) -> None:
        links.add(link)
        session = Session(store, link, next(numbers), descriptor, role.token, limits.frame_bytes)
        try:
            await session.serve()
        finally:
            links.discard(link)

    tasks = {
        asyncio.create_task(writer.run(), name="store-writer"),
        asyncio.create_task(publisher.run(), name="store-publisher"),
        asyncio.create_task(_expire(store), name="store-expiry"),
        asyncio.create_task(stop.wait(), name="store-stop"),
        asyncio.create_task(_clear_up(store), name="store-graves"),
    }
    server, address = await serve_links(role.listen, on_link, STORE_MESSAGES, role.token, limits)
    os.chmod(parse_address(address)[1], 0o600)
    member = _member(role, store.state.boot, address)
    board = MemberBoard.of(role) if role.redis_url else None
    beat = Beat(board, lambda: member, role.deployment.leases) if board else None
    try:
        if beat is not None:
            await beat.start()
        if ready is not None:
            ready(member)
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if not stop.is_set():
            for task in done:
                task.result()  # raises what ended it: a store without its writer must not go on
        await _take_leave(server, links, store)
        writer.stop()
        await asyncio.wait(
            {task for task in tasks if task.get_name() == "store-writer"},
            timeout=settings.drain_s,
        )
    finally:
        await _stop_serving(server, links)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if beat is not None and board is not None:
            await beat.stop()
            await board.close()
        await publisher.close()
        with contextlib.suppress(FileNotFoundError):
            os.unlink(parse_address(address)[1])


async def _take_leave(server: asyncio.Server, links: set[Link], store: Store) -> None:
    """Say nothing more to anybody, and hear out what clients have put already: they promised it.
    Each ends its link when it sees ours end."""
    server.close()
    store.state.granted.closed = True
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_LEAVE_S):
            while links:
                for link in tuple(links):  # some may have been accepted just now
                    link.finish()
                await asyncio.sleep(0.005)
    if links:
        log.warning("%d clients did not see in time that the store ends", len(links))
    await _stop_serving(server, links)


async def _stop_serving(server: asyncio.Server, links: set[Link]) -> None:
    server.close()
    while links:
        for link in tuple(links):
            link.abort()
        await asyncio.sleep(0.005)


async def _clear_up(store: Store) -> None:
    """Behind stores that are gone, until cancelled."""
    if store.graves is not None:
        await store.graves.run()
    await asyncio.Event().wait()


async def _expire(store: Store) -> None:
    while True:
        await asyncio.sleep(_EXPIRE_S)
        store.state.expire()
        store.opening.prefetch.look()
        if store.pins.expire():
            log.info("pins ended; %d are left", len(store.pins))


def _member(role: RoleSettings, boot: BootId, address: str) -> Member:
    return Member(
        role=Role.STORE,
        name=role.name,
        boot_id=boot,
        address=address,
        pid=os.getpid(),
        build=role.build,
        state=ReplicaState.READY,
        card=None,
        max_rows_per_step=0,
        n_blocks=0,
        n_slots=0,
    )
