"""The router's process: everything wired together, served until stopped."""

from __future__ import annotations

import asyncio
import logging
import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from prometheus_client.core import Metric as Family

from headrace.core import faults
from headrace.core.card import Member, Role
from headrace.core.errors import ConfigError
from headrace.core.ids import BootId, new_boot_id
from headrace.core.messages import Hello
from headrace.core.metrics import Metric
from headrace.core.records import RequestRecord
from headrace.core.role import Ready, RoleSettings
from headrace.core.states import ReplicaState
from headrace.kvstore import Beat, IndexReader, MemberBoard, SaltBook
from headrace.router.app import App
from headrace.router.desk import Desk
from headrace.router.fetch import Fetcher
from headrace.router.generate import Generator
from headrace.router.keys import KeyRing
from headrace.router.ledger import Ledger
from headrace.router.protocol import Protocols
from headrace.router.records import Meters, RecordFile, count, gauge
from headrace.router.replicas import Replicas
from headrace.router.server import bind, make_server
from headrace.router.settings import RouterSettings
from headrace.router.tokens import Vocabulary

log = logging.getLogger(__name__)
RECORDS = "records.jsonl"


async def run_router(
    role: RoleSettings,
    router: RouterSettings,
    *,
    ready: Ready | None = None,
    stop: asyncio.Event | None = None,
) -> None:
    """Serve HTTP on `router.host:port` until `stop` is set (for ever without one).

    `ready` is called once, with the announced member, whose address is the HTTP one; `/ready` says
    when there are replicas. At the stop no request is taken in any more, open ones may finish
    within `drain_s`. `role.listen` is not used: a router has no link that others open.
    Raises `ConfigError` for a tokenizer that cannot be read and `OSError` for a taken port."""
    faults.arm_from_environment(loopback_only=router.host in ("127.0.0.1", "::1", "localhost"))
    process = RouterProcess(role, router)
    try:
        await process.serve(ready, stop or asyncio.Event())
    finally:
        await process.close()


class RouterProcess:
    """The parts of one router. `serve` once, then `close`. `fetcher` replaces the one that the
    settings ask for (tests, which fetch from this host)."""

    def __init__(
        self, role: RoleSettings, router: RouterSettings, *, fetcher: Fetcher | None = None
    ) -> None:
        deployment = role.deployment
        vocabulary = Vocabulary(router.tokenizer)
        self._role = role
        self._router = router
        self._boot = new_boot_id()
        self.meters = Meters()
        self.ledger = Ledger()
        self._records = RecordFile(Path(role.run_dir) / RECORDS)
        self._index = IndexReader(role.redis_url, deadline_s=router.lookup_s)
        self._board = MemberBoard.of(role)
        self.desk = Desk(router, deployment, self.ledger, self._index, self)
        self.replicas = Replicas(
            self._board,
            Hello(Role.ROUTER, role.name, self._boot, role.build, None),
            role.token,
            deployment.wire,
            deployment.leases,
            self.ledger,
            self.desk,
            max_vocabulary=vocabulary.size,
        )
        self.desk.attach(self.replicas)
        self._fetcher = fetcher or Fetcher(router.fetch)
        salts = SaltBook.ensure(router.salt_directory)
        self._salt_mark = salts.mark
        self.salt_differs = False
        generator = Generator(
            router,
            deployment,
            self.desk,
            Protocols(vocabulary),
            salts,
            self._fetcher,
        )
        keys = KeyRing(router.keys, deployment.edge.key_chars)
        self.app = App(self.desk, generator, keys, self.meters, deployment.edge)
        self.meters.watch(self._gauges)

    async def serve(self, ready: Ready | None, stop: asyncio.Event) -> None:
        """Bind, follow the membership, announce, serve until `stop`, drain. Raises `ConfigError`
        while another router of this cluster serves with another salt."""
        if not await self._board.same_salt(self._salt_mark):
            raise ConfigError(
                "another router of this cluster uses another salt, so neither would find what the"
                f" other's requests stored: copy its file `salt` to {self._router.salt_directory}"
                " (mode 600), or wait for the end of that router"
            )
        listener = bind(self._router.host, self._router.port)
        host, port = listener.getsockname()[:2]
        server = make_server(self.app, self._role.deployment.edge)
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        self.replicas.start()
        member = self._member(self._boot, f"tcp://{host}:{port}")
        beat = Beat(self._board, lambda: self._now(member), self._role.deployment.leases)
        await beat.start()
        watching = asyncio.create_task(self._watch_salt(), name="router-salt")
        try:
            if ready is not None:
                ready(member)
            log.info("serving on %s port %d", host, port)
            stopping = asyncio.create_task(stop.wait())
            await asyncio.wait({serving, stopping}, return_when=asyncio.FIRST_COMPLETED)
            stopping.cancel()
            self.desk.draining = True
            await beat.now()
            await self._drain()
        finally:
            watching.cancel()
            await self._board.leave_salt(self._salt_mark)
            await beat.stop()
            server.should_exit = True
            await asyncio.wait({serving})
            listener.close()
        serving.result()

    async def _watch_salt(self) -> None:
        """Two that began while Redis was away learn of each other later: they serve, and say so."""
        while True:
            await asyncio.sleep(self._role.deployment.leases.member_beat_s)
            differs = not await self._board.same_salt(self._salt_mark)
            if differs and not self.salt_differs:
                log.error("another router of this cluster uses another salt: no hits in common")
            self.salt_differs = differs

    async def close(self) -> None:
        await self.replicas.close()
        await self._index.close()
        await self._board.close()
        self._fetcher.close()
        self._records.close()

    async def _drain(self) -> None:
        loop = asyncio.get_running_loop()
        until_s = loop.time() + self._router.drain_s
        while self.desk.open_requests and loop.time() < until_s:
            await asyncio.sleep(0.02)
        self.desk.give_up()
        await asyncio.sleep(0)

    def _member(self, boot: BootId, address: str) -> Member:
        return Member(
            role=Role.ROUTER,
            name=self._role.name,
            boot_id=boot,
            address=address,
            pid=os.getpid(),
            build=self._role.build,
            state=ReplicaState.READY,
            card=None,
            max_rows_per_step=0,
            n_blocks=0,
            n_slots=0,
        )

    def _now(self, member: Member) -> Member:
        if not self.desk.draining:
            return member
        return replace(member, state=ReplicaState.DRAINING)

    def on_end(self, record: RequestRecord) -> None:
        self.meters.take(record)
        self._records.write(record)

    def on_routed(self, seconds: float) -> None:
        self.meters.route_seconds.observe(seconds)

    def _gauges(self) -> Iterator[Family]:
        """Figures that are read when somebody asks: load, replicas, late messages."""
        desk, each = self.desk, ("pool", "replica")
        states: Counter[tuple[str, ...]] = Counter()
        backlog: dict[tuple[str, ...], float] = {}
        requests: dict[tuple[str, ...], float] = {}
        free: dict[tuple[str, ...], float] = {}
        refused: dict[tuple[str, ...], float] = {}
        resident: dict[tuple[str, ...], float] = {}
        parked: dict[tuple[str, ...], float] = {}
        for replica in self.replicas.all():
            at = (replica.role.value, replica.name)
            states[(replica.role.value, replica.state.value)] += 1
            load = self.ledger.load(replica.key)
            rate = load.rows_per_s or self._router.prefill_rows_per_s
            backlog[at] = load.backlog_rows / rate * 1e3
            requests[at] = self.ledger.own(replica.key)[0]
            if (report := self.ledger.last_report(replica.key)) is not None:
                free[at], resident[at] = report.free_blocks, report.resident_tokens
                refused[at] = report.wire_refused
                parked[at] = report.parked_requests
        yield gauge(Metric.REQUESTS_OPEN, "not ended", (), {(): desk.live_requests})
        yield gauge(Metric.REQUESTS_WAITING, "in line for room", (), {(): desk.waiting_requests})
        yield gauge(Metric.REPLICAS, "replicas known", ("pool", "state"), states)
        yield gauge(Metric.BACKLOG_MS, "predicted, as of now", each, backlog)
        yield gauge(Metric.REPLICA_REQUESTS, "dispatched by this router", each, requests)
        yield gauge(Metric.REPLICA_FREE_BLOCKS, "as last reported", each, free)
        yield gauge(Metric.REPLICA_PARKED, "gave way, as last reported", each, parked)
        yield gauge(Metric.RESIDENT_TOKENS, "as last reported", each, resident)
        yield count(Metric.ROUTED, "dispatches", (*each, "reason"), desk.rooms.routed)
        yield count(Metric.RETRIES, "further attempts", (), {(): desk.retried})
        late: dict[tuple[str, ...], float] = {(kind,): n for kind, n in desk.late.items()}
        yield count(Metric.LATE_MESSAGES, "of attempts that had ended", ("kind",), late)
        yield count(Metric.WIRE_REFUSED, "connections ended for what came", each, refused)
        yield gauge(Metric.SALT_DIFFERS, "from another router's", (), {(): self.salt_differs})
        yield count(Metric.INDEX_ERRORS, "look-ups failed", (), {(): self._index.errors})
