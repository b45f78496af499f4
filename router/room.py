"""Where a request goes, and the lines in which it waits while there is no room.

Two things are waited for: room on a decode replica, and (where decode is bound late) room on a
prefill replica, whose jobs stay counted until their product is handed over. So a full decode pool
fills the prefill pool, and then the lines.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Protocol, TypeVar

from headrace.core.card import ModelCard, Role
from headrace.core.chain import TokenIds
from headrace.core.clock import SYSTEM_CLOCK
from headrace.core.deployment import Deployment
from headrace.core.errors import LimitExceeded, Overloaded, Unavailable
from headrace.core.records import RequestRecord
from headrace.core.request import GenRequest, HandoffBind
from headrace.core.rows import GRAIN
from headrace.kvstore import Hits, IndexReader
from headrace.router.ledger import Ledger
from headrace.router.line import Line
from headrace.router.policy import Choice, Route, Work, choose_decode, route, size_up
from headrace.router.replicas import Replica, Replicas
from headrace.router.settings import RouterSettings

T = TypeVar("T")
MAX_RETRY_AFTER_S = 60.0


class Witness(Protocol):
    """Who measures. Must not wait."""

    def on_end(self, record: RequestRecord) -> None: ...
    def on_routed(self, seconds: float) -> None: ...


class Rooms:
    """Chooses replicas by the loads of the moment. One a router; one event loop."""

    replicas: Replicas  # set once, by the desk

    def __init__(
        self,
        settings: RouterSettings,
        deployment: Deployment,
        ledger: Ledger,
        index: IndexReader,
        witness: Witness,
    ) -> None:
        self.routed: Counter[tuple[str, ...]] = Counter()
        self.bind = deployment.handoff_bind
        self._settings = settings
        self._deployment = deployment
        self._ledger = ledger
        self._index = index
        self._witness = witness
        self._for_decode = Line()
        self._for_prefill = Line()
        self._news = asyncio.Event()  # set and replaced when a replica joins or reports
        self._kicked = asyncio.Event()  # the same on every kick
        self._promised_s = 0.0  # when the last place of those is free that were promised to refused
        self._turn = self._bind_turn = 0  # two, or every second replica would get all late binds

    @property
    def waiting(self) -> int:
        """Requests in line, those included that have begun."""
        return len(self._for_decode) + len(self._for_prefill)

    def kick(self) -> None:
        """Something may have made room."""
        self._for_decode.kick()
        self._for_prefill.kick()
        self._kicked.set()
        self._kicked = asyncio.Event()

    def news(self) -> None:
        """A replica joined or reported its load."""
        self._news.set()
        self._news = asyncio.Event()
        self.kick()

    def card(self) -> ModelCard:
        """The served model. Raises `Unavailable` when no decode replica is routable."""
        card = self.replicas.card
        if card is None:
            raise Unavailable("no decode replica is ready")
        return card

    async def find(
        self,
        request: GenRequest,
        generated_ids: TokenIds,
        avoid: set[str],
        *,
        again: bool,
        taken: Callable[[], set[str]],
    ) -> tuple[Work, Route]:
        """Look the prompt up and choose replicas, waiting in line while none has room. A further
        attempt does not queue behind requests that have not begun, and waits `resume_wait_s` for a
        decode replica to come back; `generated_ids` are the tokens that it resumes after. `taken`
        names replicas that must not be chosen as of now; while it names all, the request waits
        outside the lines.

        Raises `Unavailable` without a routable decode replica, `Overloaded` when the lines are
        full, `LimitExceeded` when no replica can ever hold the request."""
        if not again:
            return await self._find(request, generated_ids, avoid, taken, again=False)
        return await self._patiently(
            lambda: self._find(request, generated_ids, avoid, taken, again=True)
        )

    async def find_decode(
        self, work: Work, avoid: set[str], taken: Callable[[], set[str]]
    ) -> Choice:
        """A decode replica for a request that prefill has begun: by the loads of now, before those
        who have not begun. Raises as `find` does for a further attempt, without `Overloaded`."""

        def look() -> Choice | None:
            decodes = _untaken(_others(self._decodes(work), avoid), taken())
            if not decodes:
                raise _AllTaken
            self._bind_turn += 1
            candidates = [self.replicas.candidate(replica) for replica in decodes]
            found = choose_decode(
                candidates, work.resident_tokens, self._settings.queue_ahead, self._bind_turn
            )
            if found is not None:
                self._count(Role.DECODE, found)
            return found

        async def once() -> Choice:
            found = look()
            return found if found else await self._for_decode.wait(look, begun=True)

        return await self._patiently(once)

    async def _patiently(self, once: Callable[[], Awaitable[T]]) -> T:
        """`once`, again for up to `resume_wait_s` while no decode replica is routable."""
        loop = asyncio.get_running_loop()
        until_s = loop.time() + self._settings.resume_wait_s
        while True:
            try:
                return await once()
            except Unavailable:
                if loop.time() >= until_s:
                    raise
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout_at(until_s):
                        await self._news.wait()
            except _AllTaken:
                await self._kicked.wait()

    async def _find(
        self,
        request: GenRequest,
        generated_ids: TokenIds,
        avoid: set[str],
        taken: Callable[[], set[str]],
        *,
        again: bool,
    ) -> tuple[Work, Route]:
        begun_s = SYSTEM_CLOCK.now_s()
        card = self.card()
        hits = await self._look_up(request, card)
        work = size_up(
            request.n_tokens,
            request.max_tokens,
            hits.blocks,
            hits.windows,
            request.keep_tokens,
            card.geometry,
            self._deployment.local_prefill_rows,
            n_generated=len(generated_ids),
            depth_tokens=self._deployment.depth_for(card.window_tokens),
        )
        work = replace(work, hit_tiers={t.value: n * GRAIN for t, n in hits.by_tier.items()})
        late = self.bind is HandoffBind.LATE and work.wants_prefill
        late = late and bool(_others(self.replicas.routable(Role.PREFILL), avoid))
        line = self._for_prefill if late else self._for_decode
        found = self._choose(work, avoid, taken) if again or not len(line) else None
        self._witness.on_routed(SYSTEM_CLOCK.now_s() - begun_s)
        if found is not None:
            return work, found
        if not again:  # what has begun was let in before
            self._check_wait(line, Role.PREFILL if late else Role.DECODE, request.deadline_s)
        return work, await line.wait(lambda: self._choose(work, avoid, taken), begun=again)

    def _check_wait(self, line: Line, pool: Role, deadline_s: float) -> None:
        """Raises `Overloaded` when the lines are full, with the time until the next place that was
        promised to nobody else, or when a place in this one would be too long a wait, with the time
        after which it is not if nobody else comes."""
        edge = self._deployment.edge
        keys = [replica.key for replica in self.replicas.routable(pool)]
        wait_s = self._ledger.wait_s(keys, len(line) + 1)
        if self.waiting >= edge.queued_requests:
            raise Overloaded(
                f"queued_requests is limited to {edge.queued_requests}, all replicas are full",
                retry_after_s=min(MAX_RETRY_AFTER_S, self._promise_s(wait_s, len(line) + 1)),
            )
        name, most_s = min(
            ("queue_wait_s", edge.queue_wait_s), ("the deadline", deadline_s), key=lambda x: x[1]
        )
        if wait_s > most_s:
            raise Overloaded(
                f"{name} is {most_s:g} s, a wait of {wait_s:.0f} s is predicted",
                retry_after_s=min(MAX_RETRY_AFTER_S, wait_s - most_s),
            )

    def _promise_s(self, wait_s: float, places: int) -> float:
        """In how many seconds the next place comes free: one after the other for those who are
        refused, or all would come back for the first. Who does not come back delays nobody by more
        than the whole line, `places` that take `wait_s`."""
        now_s = SYSTEM_CLOCK.now_s()
        ahead_s = min(wait_s, max(0.0, self._promised_s - now_s) + wait_s / places)
        self._promised_s = now_s + ahead_s
        return ahead_s

    async def _look_up(self, request: GenRequest, card: ModelCard) -> Hits:
        """What is stored of the prompt: the exact blocks, and in mode `replay` those behind them
        that a replay wrote."""
        exact = card.namespace().digest()
        if request.exact_root is None:
            return await self._index.hit_blocks(exact, request.digests)
        digests = request.exact_digests(request.token_ids)
        first = await self._index.hit_blocks(exact, digests)
        own = card.namespace(self._deployment.exactness).digest()
        rest = request.digests[first.blocks :]
        behind = await self._index.hit_blocks(own, rest)
        tiers = Counter(first.by_tier) + Counter(behind.by_tier)
        return Hits(first.blocks + behind.blocks, tiers)

    def _decodes(self, work: Work) -> list[Replica]:
        decodes = self.replicas.routable(Role.DECODE)
        if not decodes:
            raise Unavailable("no decode replica is ready")
        most = max(replica.capacity_tokens for replica in decodes)
        if work.resident_tokens > most:
            raise LimitExceeded(
                f"a replica holds {most} tokens, prompt and max_tokens need {work.resident_tokens}",
                param="max_tokens",
                code="context_length_exceeded",
            )
        return decodes

    def _choose(self, work: Work, avoid: set[str], taken: Callable[[], set[str]]) -> Route | None:
        theirs = taken()
        decodes = _untaken(_others(self._decodes(work), avoid), theirs)
        prefills = _untaken(_others(self.replicas.routable(Role.PREFILL), avoid), theirs)
        if not decodes:
            raise _AllTaken
        self._turn += 1
        found = route(
            work,
            [self.replicas.candidate(r) for r in decodes],
            [self.replicas.candidate(r) for r in prefills],
            bind=self.bind,
            queue_ahead=self._settings.queue_ahead,
            start_rows_per_s=self._settings.prefill_rows_per_s,
            turn=self._turn,
        )
        if found is not None and found.decode is not None:
            self._count(Role.DECODE, found.decode)
        if found is not None and found.prefill is not None:
            self._count(Role.PREFILL, found.prefill)
        return found

    def _count(self, role: Role, choice: Choice) -> None:
        self.routed[(role.value, choice.key.partition("/")[0], choice.reason)] += 1


class _AllTaken(Exception):
    """Every decode replica has a request which the one that looks may not share it with."""


def _untaken(replicas: list[Replica], taken: set[str]) -> list[Replica]:
    return [replica for replica in replicas if replica.key not in taken]


def _others(replicas: list[Replica], avoid: set[str]) -> list[Replica]:
    """Without those that failed this request, unless nobody else is left. A prefill replica that
    failed is never given the same request again: decode can do without."""
    left = [replica for replica in replicas if replica.key not in avoid]
    if left or not replicas or replicas[0].role is Role.PREFILL:
        return left
    return replicas
