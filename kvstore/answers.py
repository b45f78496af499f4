"""The running store's side of `questions`."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable
from dataclasses import asdict
from typing import Any

from headrace.core.errors import ConfigError, HeadraceError
from headrace.kvstore.cleaning import clean, contents
from headrace.kvstore.importing import ImportDesk
from headrace.kvstore.messages import cut_digests
from headrace.kvstore.objects import object_key
from headrace.kvstore.pins import MAX_TTL_S, Pin, PinBook
from headrace.kvstore.questions import Answer, Question, Topic, read_values
from headrace.kvstore.settings import Kind
from headrace.kvstore.state import StoreState
from headrace.kvstore.workshop.garbage import Wishes
from headrace.kvstore.workshop.survey import Seen, chains, plain, sums

log = logging.getLogger(__name__)
MAX_ROWS = 10_000


class Answers:
    """Answers one question at a time; nothing here holds up the event loop for a large store: what
    goes over all objects runs in a thread, over a copy of the list."""

    def __init__(
        self,
        state: StoreState,
        pins: PinBook,
        domains: tuple[str, ...],
        republish: Callable[[], bool],
        metrics: Callable[[], str],
        scrub: Callable[[int, bool], Awaitable[dict[str, Any]]],
        sweep: Callable[[], Awaitable[tuple[int, int]]],
        desk: ImportDesk,
    ) -> None:
        self._state = state
        self._pins = pins
        self._domains = domains
        self._republish = republish
        self._metrics = metrics
        self._scrub = scrub
        self._sweep = sweep
        self._desk = desk

    async def answer(self, question: Question) -> Answer:
        """Never raises for what a question holds."""
        verbs: dict[Topic, Callable[[str], Awaitable[dict[str, Any]]]] = {
            Topic.CHAINS: self._chains,
            Topic.CHAIN: self._chain,
            Topic.PINS: self._list_pins,
            Topic.PIN: self._pin,
            Topic.UNPIN: self._unpin,
            Topic.REPUBLISH: self._publish,
            Topic.SCRUB: self._read_back,
            Topic.CONTENTS: self._contents,
            Topic.CLEAN: self._clean,
            Topic.SWEEP: self._sweep_index,
            Topic.LAYOUT: self._layout,
            Topic.ROOM: self._room,
            Topic.METRICS: self._scrape,
        }
        try:
            values = await verbs[question.topic](question.text)
        except HeadraceError as error:
            return Answer(question.call, False, error.message)
        except ValueError as error:
            return Answer(question.call, False, str(error)[:200])
        except Exception as error:
            log.exception("a question about %s failed", question.topic)
            return Answer(question.call, False, f"the store failed: {type(error).__name__}")
        return Answer(question.call, True, json.dumps(values))

    async def _chains(self, text: str) -> dict[str, Any]:
        limit = read_values(text, limit=int)["limit"]
        seen = [
            Seen(e.facts, e.written_at_s, e.slot is not None, e.disk is not None)
            for e in tuple(self._state.objects.values())
        ]

        def survey() -> dict[str, Any]:
            rows = chains(seen, self._domains)
            return {
                "chains": plain(rows[: max(0, min(limit, MAX_ROWS))]),
                "total": len(rows),
                "sums": plain(sums(seen, self._domains)),
            }

        return await asyncio.to_thread(survey)

    async def _chain(self, text: str) -> dict[str, Any]:
        values = read_values(text, namespace=str, tip=str)
        chain = stored_chain(
            self._state, bytes.fromhex(values["namespace"]), bytes.fromhex(values["tip"])
        )
        digests = [key[-32:].hex() for key in reversed(chain)]  # from the root on
        return {
            "digests": "".join(digests),
            "blocks": len(chain),
            "payload_bytes": sum(chain.values()),
        }

    async def _list_pins(self, text: str) -> dict[str, Any]:
        return {
            "pins": [asdict(pin) for pin in self._pins.pins()],
            "held_bytes": self._pins.held_bytes,
            "quota_bytes": self._pins.quota_bytes,
        }

    async def _pin(self, text: str) -> dict[str, Any]:
        values = read_values(text, name=str, namespace=str, tip=str, ttl_s=float)
        ttl_s = values["ttl_s"]
        if not 0 < ttl_s <= MAX_TTL_S:
            raise ConfigError(f"ttl_s must be above 0 and at most {MAX_TTL_S}, got {ttl_s}")
        end_s = self._state.clock.wall_s() + ttl_s
        pin = Pin(values["name"], values["namespace"], values["tip"], end_s)
        return {"held_bytes": self._pins.pin(pin), "expires_at_s": end_s}

    async def _unpin(self, text: str) -> dict[str, Any]:
        return {"ended": self._pins.unpin(read_values(text, name=str)["name"])}

    async def _publish(self, text: str) -> dict[str, Any]:
        if not self._republish():
            raise ConfigError("this store has no index to write: the cluster has no Redis")
        return {"objects": len(self._state.objects)}

    async def _read_back(self, text: str) -> dict[str, Any]:
        values = read_values(text, segment=int, drop=bool)
        return await self._scrub(values["segment"], values["drop"])

    async def _contents(self, text: str) -> dict[str, Any]:
        values = read_values(text, namespace=str, tips=list, offset=int)
        namespace, found = bytes.fromhex(values["namespace"]), []
        for tip in values["tips"]:
            chain = stored_chain(self._state, namespace, bytes.fromhex(str(tip)))
            if not chain:
                raise ConfigError(f"the chain that ends in {str(tip)[:16]} is not stored whole")
            found.append(chain)
        rows, total = contents(self._state, found, max(0, values["offset"]))
        return {"rows": rows, "total": total}

    async def _clean(self, text: str) -> dict[str, Any]:
        values = read_values(text, before_s=int, namespaces=list, domains=list, dry_run=bool)
        wishes = Wishes(
            values["before_s"],
            frozenset(bytes.fromhex(str(one)) for one in values["namespaces"]),
            frozenset(bytes.fromhex(str(one)) for one in values["domains"]),
        )
        found = await clean(self._state, self._pins, wishes, dry_run=values["dry_run"])
        return found | {"pins_ended": []}  # a running store ends pins by itself

    async def _layout(self, text: str) -> dict[str, Any]:
        values = read_values(text, namespace=str)
        return await self._desk.layout(bytes.fromhex(values["namespace"]))

    async def _room(self, text: str) -> dict[str, Any]:
        values = read_values(text, kind=str, namespace=str, digests=str)
        digests = cut_digests(bytes.fromhex(values["digests"]))
        return self._desk.room(Kind(values["kind"]), bytes.fromhex(values["namespace"]), digests)

    async def _sweep_index(self, text: str) -> dict[str, Any]:
        stores, records = await self._sweep()
        return {"stores": stores, "records": records}

    async def _scrape(self, text: str) -> dict[str, Any]:
        return {"text": self._metrics()}


def stored_chain(state: StoreState, namespace: bytes, tip: bytes) -> dict[bytes, int]:
    """Keys and payload bytes of a chain that is durable as a whole, tip first; {} if it is not."""
    found: dict[bytes, int] = {}
    at = tip
    while True:
        key = object_key(Kind.KV, namespace, at)
        entry = state.objects.get(key)
        if entry is None or entry.disk is None or key in found:
            return {}
        found[key] = entry.facts.payload_bytes
        if not entry.facts.block:
            return found
        at = entry.facts.parent
