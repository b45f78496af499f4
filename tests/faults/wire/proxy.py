"""A proxy that knows frames: it stands before a role and does to each what a rule says.

Everybody who learns a role's address learns the proxy's, so both router and prefill speak to decode
through it. Frames of one attempt and direction stay in order, as TCP keeps them; what is put off is
overtaken by those of all others.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from headrace.core.frames import HEADER_BYTES, FrameCodec
from headrace.core.ids import JobKey
from headrace.core.limits import WireLimits
from headrace.core.link import parse_address
from headrace.core.messages import MESSAGES, Hello
from headrace.core.peers import NO_JOB

UNTOUCHED = ("Hello", "LoadReport", "Drain")  # of no job


@dataclass(frozen=True, slots=True)
class Seen:
    """A frame on its way. `nth` counts frames of this kind, direction and attempt from 1."""

    kind: str  # the message's class
    key: JobKey
    labels: tuple[str, ...]  # of the prompts: a rule draws the same whatever the timing
    towards: str  # the role that gets it
    before: str  # the replica that the proxy stands before
    nth: int
    message: Any


@dataclass(frozen=True, slots=True)
class Deed:
    """What becomes of a frame: sent so many times, after so long, and when `until` is set."""

    name: str
    times: int = 1
    after_s: float = 0.0
    until: asyncio.Event | None = None

    @property
    def waits(self) -> bool:
        return self.after_s > 0 or self.until is not None


PASS, DROP, TWICE = Deed("pass"), Deed("drop", times=0), Deed("twice", times=2)
Rule: TypeAlias = Callable[[Seen], Deed]


def later(seconds: float) -> Deed:
    return Deed("later", after_s=seconds)


def held(until: asyncio.Event) -> Deed:
    """Not sent on before the event; nor is what follows it of the same attempt."""
    return Deed("held", until=until)


def seeded(seed: int, share: float, deeds: Sequence[Callable[[random.Random], Deed]]) -> Rule:
    """Each frame by a draw of its own, of seed and what it is: replayable whatever the timing."""

    def rule(seen: Seen) -> Deed:
        who = (seed, *seen.labels, seen.key.epoch, seen.towards, seen.kind, seen.nth)
        draw = random.Random("/".join(map(str, who)))
        return draw.choice(deeds)(draw) if draw.random() < share else PASS

    return rule


@dataclass
class Traffic:
    """What all proxies of a test share: the rule in force, and what was seen and done."""

    rule: Rule = lambda seen: PASS
    seen: list[Seen] = field(default_factory=list)
    done: Counter[tuple[str, str]] = field(default_factory=Counter)  # (deed, kind)
    labels: dict[str, str] = field(default_factory=dict)  # by request id

    def reset(self, rule: Rule = lambda seen: PASS) -> None:
        self.rule = rule
        self.seen.clear()
        self.done.clear()

    def count(self, deed: str) -> int:
        """Frames that met this deed."""
        return sum(n for (name, _), n in self.done.items() if name == deed)

    def frames(self, kind: str, before: str = "") -> list[Seen]:
        return [s for s in self.seen if s.kind == kind and s.before.startswith(before)]

    def decide(self, message: Any, towards: str, before: str) -> tuple[JobKey, Deed]:
        """Whose frame it is, and what becomes of it."""
        kind = type(message).__name__
        if kind in UNTOUCHED:
            return NO_JOB, PASS
        request = getattr(message, "request", None)
        if request is not None:
            self.labels.setdefault(request.request_id, ".".join(map(str, request.token_ids[:3])))
        key = _key(message)
        nth = 1 + sum(
            (s.kind, s.key, s.towards, s.before) == (kind, key, towards, before)
            for s in self.seen[-2000:]
        )
        keys = [item.key for item in getattr(message, "items", ())] or [key]
        labels = tuple(self.labels.get(each.request_id, "") for each in keys)
        seen = Seen(kind, key, labels, towards, before, nth, message)
        self.seen.append(seen)
        deed = self.rule(seen)
        self.done[deed.name, kind] += 1
        return key, deed


def _key(message: Any) -> JobKey:
    if (request := getattr(message, "request", None)) is not None:
        return request.key
    if (items := getattr(message, "items", None)) is not None:
        return items[0].key
    return message.key


class FrameProxy:
    """Before one replica. `target` is set when that listens; until then connections are closed."""

    def __init__(self, before: str, traffic: Traffic, token: str) -> None:
        self.before = before
        self.traffic = traffic
        self.target = ""
        self.address = ""
        self._codec = FrameCodec(token, WireLimits().frame_bytes)
        self._server: asyncio.Server | None = None
        self._open: set[asyncio.Task[None]] = set()

    async def start(self) -> FrameProxy:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.address = f"tcp://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    def stand_before(self, replica: Any) -> None:
        """Call before the replica's `start`: others are told the proxy's address."""
        listen = replica.shell.listen

        async def listen_behind() -> None:
            await listen()
            self.target, replica.shell.address = replica.shell.address, self.address

        replica.shell.listen = listen_behind

    async def close(self) -> None:
        assert self._server is not None
        self._server.close()
        for task in self._open:
            task.cancel()
        await asyncio.gather(*self._open, return_exceptions=True)

    async def _serve(self, reader: Any, writer: Any) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._open.add(task)
        ends = [writer]
        try:
            if not self.target:
                return
            _, host, port = parse_address(self.target)
            there, back = await asyncio.open_connection(host, port)
            ends.append(back)
            greeted: asyncio.Future[str] = asyncio.get_running_loop().create_future()
            pumps = [
                asyncio.create_task(self._pump(reader, back, greeted, inward=True)),
                asyncio.create_task(self._pump(there, writer, greeted, inward=False)),
            ]
            try:
                await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for pump in pumps:
                    pump.cancel()
                await asyncio.gather(*pumps, return_exceptions=True)
        except ConnectionError:
            pass
        finally:
            for end in ends:
                end.transport.abort()
            self._open.discard(task)

    async def _pump(self, source: Any, sink: Any, greeted: Any, *, inward: bool) -> None:
        """Frames of one direction. `greeted`: the role that connected."""
        waiting: dict[JobKey, asyncio.Task[None]] = {}
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                header = await source.readexactly(HEADER_BYTES)
                payload = await source.readexactly(self._codec.payload_bytes(header))
                message = MESSAGES.decode(payload)
                if inward and isinstance(message, Hello) and not greeted.done():
                    greeted.set_result(message.role.value)
                caller = greeted.result() if greeted.done() else ""
                towards = self.before.partition("-")[0] if inward else caller
                key, deed = self.traffic.decide(message, towards, self.before)
                frames, before = (header + payload) * deed.times, waiting.get(key)
                if deed.waits or (before is not None and not before.done()):
                    waiting[key] = asyncio.create_task(_put_off(sink, frames, deed, before))
                else:
                    sink.write(frames)
                    await sink.drain()


async def _put_off(
    sink: asyncio.StreamWriter, frames: bytes, deed: Deed, before: asyncio.Task[None] | None
) -> None:
    if deed.after_s:
        await asyncio.sleep(deed.after_s)
    if deed.until is not None:
        await deed.until.wait()
    if before is not None:
        await before
    if not sink.is_closing():
        sink.write(frames)
