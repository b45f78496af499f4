"""A small cluster in one process: a real store, one prefill and two decode replicas on real
sockets, and roles as processes of their own for tests that kill them."""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import pytest_asyncio
import xxhash
from headrace_tests import module

from headrace.core.card import ModelCard
from headrace.core.chain import as_token_ids, block_digests, root_digest, window_digest
from headrace.core.deployment import Deployment
from headrace.core.ids import Digest, RequestId, new_request_id
from headrace.core.limits import LeaseTimes
from headrace.core.loops import new_event_loop
from headrace.core.peers import Peer
from headrace.core.request import GenRequest, Sampling
from headrace.core.role import RoleSettings
from headrace.decode import DecodeReplica
from headrace.engine import EngineSettings
from headrace.kvstore import EmbeddedRedis, Kind, StoreSettings, run_store
from headrace.prefill import PrefillReplica

RoleProcess = module("tests/flow/roles/role_process.py").RoleProcess
module("tests/kvstore/disk.py")

# Small steps, so that a prompt takes several and something can happen in between.
ENGINE = EngineSettings(n_blocks=60, n_slots=4, max_rows_per_step=128, replay_rows_per_step=128)
LEASES = LeaseTimes(handoff_s=4.0)
# Less than what a lease has left that is renewed every third of its time, and than the time after
# which a hand-off without progress is given up: what is back by then was given back.
SOON_S = 2.5


@dataclass(eq=False)
class Cluster:
    """Everything in one process. `prefill` and `decodes` are the replicas themselves, so that a
    test can look at their engines and counts; `to_*` are the router end's connections."""

    prefill: PrefillReplica
    decodes: list[DecodeReplica]
    router: Any  # RouterEnd of the folder above, as every `router` here
    to_prefill: Peer
    to_decode: list[Peer]
    keep_tokens: int

    @property
    def card(self) -> ModelCard:
        card = self.prefill.shell.card
        assert card is not None
        return card

    def request(
        self,
        prompt: Sequence[int],
        max_tokens: int = 8,
        *,
        domain: str = "tenant-a",
        keep_tokens: int | None = None,
        epoch: int = 0,
        request_id: RequestId | None = None,
        deadline_s: float = 60.0,
        stop: tuple[int, ...] = (),
        sampling: Sampling | None = None,
    ) -> GenRequest:
        deployment, salt = self.prefill.role.deployment, domain.encode().ljust(32, b".")
        exact_root = root_digest(self.card.namespace().digest(), salt)
        root = root_digest(self.card.namespace(deployment.exactness).digest(), salt)
        ids = as_token_ids(list(prompt))
        return GenRequest(
            request_id=request_id or new_request_id(),
            epoch=epoch,
            token_ids=ids,
            chain_root=root,
            digests=block_digests(root, ids),
            keep_tokens=keep_tokens or self.keep_tokens,
            max_tokens=max_tokens,
            sampling=sampling or Sampling(),
            stop_token_ids=stop,
            mode=deployment.handoff_mode,
            domain=domain,
            deadline_s=deadline_s,
            exact_root=None if root == exact_root else exact_root,
        )

    async def handoff(
        self, request: GenRequest, decode: int = 0, *, router: Any = None, **options: Any
    ) -> Any:
        """Dispatch with prefill; decode is named when prefill asks, or as `bind` says."""
        router = router or self.router
        return await router.send(
            request,
            router.to[f"decode-{decode}"],
            router.to["prefill-0"],
            decode_address=self.decodes[decode].shell.address,
            **options,
        )

    async def rebind(self, call: Any, decode: int = 1) -> Any:
        """Bind another decode replica to the prefill of `call`."""
        to, address = self.to_decode[decode], self.decodes[decode].shell.address
        return await self.router.rebind(call, to, address)

    async def local(self, request: GenRequest, decode: int = 0, **options: Any) -> Any:
        """Dispatch to decode alone."""
        return await self.router.send(request, self.to_decode[decode], **options)

    async def damage(self, kind: Kind, digest: Digest) -> None:
        """Flip one bit of a stored object in the arena, where every process maps it, and see that
        its checksum no longer fits."""
        store = self.prefill.store
        if kind is Kind.KV:
            (place,) = await store.open_prefix([digest], None)
            own = digest
        else:
            found = await store.open_windows([(0, digest)], None)
            assert found is not None, "no such window record"
            place, own = found[1], window_digest(digest)
        buffer = bytearray(place.payload_bytes)
        assert store.read_into(place, own, buffer), "nothing to damage"
        boot, arena = store._mapped
        assert boot == place.store
        region, slot = arena.locate(place.offset)
        payload = arena.payload(region, slot, place.payload_bytes)
        payload[place.payload_bytes // 3] ^= 0x10
        # Not by reading it as a client: that would tell the store before the test does.
        assert xxhash.xxh3_64_intdigest(payload) != place.checksum

    async def written(self) -> None:
        """All write-behind of the decode replicas has reached the store."""
        for decode in self.decodes:
            assert decode.work is not None
            assert await decode.work.committer.flush(5.0)

    async def at_rest(self, within_s: float | None = None) -> None:
        """Within `within_s` every engine block and slot, job, lease and reservation is back;
        without it, soon, and no lease has ended by its time for that."""
        problem: str | None = "not looked"
        lapsed = await self._lapsed() if within_s is None else None
        within_s = SOON_S if within_s is None else within_s
        try:
            async with asyncio.timeout(within_s):
                while (problem := await self._held()) is not None:
                    await asyncio.sleep(0.01)
        except TimeoutError:
            raise AssertionError(f"not at rest after {within_s} s: {problem}") from None
        assert lapsed is None or await self._lapsed() == lapsed, "a lease was not given back"
        for replica in (self.prefill, *self.decodes):
            await replica.driver.call(replica.engine.check_integrity)

    async def _lapsed(self) -> tuple[int, ...]:
        """Leases that ended by their time: by the account of each client, and of the store."""
        clients = [replica.store for replica in (self.prefill, *self.decodes)]
        stat = await clients[0].stat()
        return (*(client.lapsed for client in clients), 0 if stat is None else stat.lapsed)

    async def _held(self) -> str | None:
        for replica in (self.prefill, *self.decodes):
            assert replica.work is not None
            name, stats = replica.role.name, replica.driver.stats
            if replica is self.prefill and replica.work.underway.computers:
                return f"{name} has claims of {set(replica.work.underway.computers.values())}"
            if replica.work.jobs:
                return (
                    f"{name} has jobs {[(str(k), j.state) for k, j in replica.work.jobs.items()]}"
                )
            held = (stats.waiting, stats.running, stats.held_blocks)
            if held != (0, 0, 0) or stats.free_slots != replica.settings.n_slots:
                return f"{name}: {stats}"
            if replica.store.held:
                return f"{name} holds {replica.store.held} of the store"
        stat = await self.prefill.store.stat()
        if stat is not None and (
            stat.leases or stat.reservations or stat.leased_objects or stat.states
        ):
            return f"store: {stat}"
        return None


@pytest.hookimpl(optionalhook=True)
def pytest_asyncio_loop_factories() -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    """Roles are tested on the loop that they run on."""
    return {"uvloop": new_event_loop}


@pytest.fixture(scope="session")
def role_settings(run_dir: str, valkey: EmbeddedRedis, token: str) -> Callable[..., RoleSettings]:
    def make(name: str, tag: str, **deployment: Any) -> RoleSettings:
        options = {"leases": LEASES, **deployment}
        return RoleSettings(
            name=name,
            listen=f"unix://{run_dir}/{tag}.store" if name == "store" else "tcp://127.0.0.1:0",
            token=token,
            redis_url=valkey.url,
            store_address=f"unix://{run_dir}/{tag}.store",
            run_dir=run_dir,
            build="test",
            deployment=Deployment(**options),
        )

    return make


@pytest.fixture(scope="module")
def store_settings(run_dir: str, yardstick: Any) -> Callable[..., StoreSettings]:
    layout = yardstick.layout

    def make(tag: str, **sizes: Any) -> StoreSettings:
        options = {
            "directory": f"{run_dir}/{tag}",
            "arena_bytes": 16 << 20,
            "ssd_bytes": 32 << 20,
            "segment_bytes": 4 << 20,
            "block_bytes": layout.block_bytes,
            "window_bytes": layout.window_record_bytes,
            **sizes,
        }
        return StoreSettings(**options)

    return make


Roles = Callable[[str], RoleSettings]


@contextlib.asynccontextmanager
async def store_task(
    role: RoleSettings, settings: StoreSettings, calls: Any = None
) -> AsyncIterator[None]:
    """A store in this process."""
    stop, up = asyncio.Event(), asyncio.Event()
    task = asyncio.create_task(
        run_store(role, settings, ready=lambda _: up.set(), stop=stop, calls=calls)
    )
    waiting = asyncio.create_task(up.wait())
    await asyncio.wait([task, waiting], return_when=asyncio.FIRST_COMPLETED)
    waiting.cancel()
    if task.done():
        task.result()
    yield
    stop.set()
    await task


@contextlib.asynccontextmanager
async def replicas(
    roles: Roles, yardstick: Any, router: Any, settings: EngineSettings = ENGINE
) -> AsyncIterator[Cluster]:
    """One prefill, two decodes and a router end, on a store that serves already."""
    prefill = PrefillReplica(roles("prefill-0"), settings)
    decodes = [DecodeReplica(roles(f"decode-{i}"), settings) for i in (0, 1)]
    try:
        await asyncio.gather(*(replica.start() for replica in (prefill, *decodes)))
        to_prefill = await router.connect(prefill.shell.address)
        to_decode = [await router.connect(decode.shell.address) for decode in decodes]
        yield Cluster(prefill, decodes, router, to_prefill, to_decode, yardstick.keep_tokens)
    finally:
        await router.close()
        await asyncio.gather(*(replica.close() for replica in (prefill, *decodes)))


@pytest.fixture(scope="session")
def starters() -> tuple[Any, Any]:
    return store_task, replicas


@pytest.fixture(scope="module")
def tag(request: pytest.FixtureRequest) -> str:
    """Names the store of a module."""
    return str(request.module.__name__).rsplit("_", 1)[-1][:12]


@pytest.fixture(scope="module")
def roles(
    request: pytest.FixtureRequest,
    role_settings: Callable[..., RoleSettings],
    tag: str,
    yardstick: Any,
) -> Roles:
    """The module may name settings of its deployment in DEPLOYMENT."""
    options = {"checkpoint": yardstick.checkpoint, **getattr(request.module, "DEPLOYMENT", {})}
    return functools.partial(role_settings, tag=tag, model=yardstick.model, **options)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(
    request: pytest.FixtureRequest,
    tag: str,
    roles: Roles,
    store_settings: Callable[..., StoreSettings],
    yardstick: Any,
    router_end: Any,
) -> AsyncIterator[Cluster]:
    """One cluster for the tests of a module, which must leave it at rest. The module may name
    sizes of its store in STORE, and settings of its engines in ENGINE."""
    sizes = getattr(request.module, "STORE", {})
    settings = getattr(request.module, "ENGINE", ENGINE)
    serving = store_task(roles("store"), store_settings(tag, **sizes))
    async with serving, replicas(roles, yardstick, router_end(), settings) as all_:
        yield all_


@pytest_asyncio.fixture(loop_scope="module")
async def new_router(
    cluster: Cluster, router_end: Any
) -> AsyncIterator[Callable[[str], Awaitable[Any]]]:
    """`await new_router(name)`: a further router end, connected to all replicas."""
    made: list[Any] = []

    async def make(name: str) -> Any:
        router = router_end(name)
        made.append(router)
        for replica in (cluster.prefill, *cluster.decodes):
            await router.connect(replica.shell.address)
        return router

    yield make
    for router in made:
        await router.close()


@pytest_asyncio.fixture(loop_scope="module")
async def new_decode(
    cluster: Cluster, roles: Callable[..., RoleSettings]
) -> AsyncIterator[Callable[..., Awaitable[DecodeReplica]]]:
    """`await new_decode(name, **deployment)`: a further decode replica on the same store."""
    made: list[DecodeReplica] = []

    async def make(
        name: str, settings: EngineSettings = ENGINE, **deployment: Any
    ) -> DecodeReplica:
        replica = DecodeReplica(roles(name, **deployment), settings)
        made.append(replica)
        await replica.start()
        return replica

    yield make
    for replica in made:
        await replica.close()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def processes(
    request: pytest.FixtureRequest, cluster: Cluster, roles: Roles
) -> AsyncIterator[dict[str, RoleProcess]]:
    """The roles that the module names in PROCESSES (name -> kind and faults), on the same store,
    each a process of its own. Started together: it is the import of torch that takes the time."""
    wanted = request.module.PROCESSES
    made = {
        name: RoleProcess(kind, roles(name), ENGINE, faults)
        for name, (kind, faults) in wanted.items()
    }
    try:
        await asyncio.gather(*(process.start() for process in made.values()))
        yield made
    finally:
        for process in made.values():
            await process.kill()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster_with_store_process(
    request: pytest.FixtureRequest,
    role_settings: Callable[..., RoleSettings],
    store_settings: Callable[..., StoreSettings],
    yardstick: Any,
    router_end: Any,
) -> AsyncIterator[tuple[Cluster, RoleProcess]]:
    """A cluster of its own, whose store may be killed and started again."""
    roles = functools.partial(role_settings, tag="apart", model=yardstick.model)
    sizes = getattr(request.module, "STORE", {})
    settings = getattr(request.module, "ENGINE", ENGINE)
    store = RoleProcess("store", roles("store"), store_settings("apart", **sizes), "")
    await store.start()
    try:
        async with replicas(roles, yardstick, router_end(), settings) as all_:
            yield all_, store
    finally:
        await store.kill()
