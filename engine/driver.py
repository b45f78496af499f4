"""An engine in a thread of its own, and the asyncio side that talks to it."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import deque
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

from headrace.core.errors import Unavailable
from headrace.engine.engine import Engine
from headrace.engine.jobs import EngineStats, Event

_log = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")


class EngineDriver:
    """Runs `engine` from `start` to `stop`: between steps it runs the functions given to `call`,
    in their order; while there is work it steps; else it sleeps.

    `on_events(list of events)` is called in the event loop after every step that had events, in
    their order. If a step raises, the engine is not touched again: `on_failure(error)` is called
    in the loop, and every `call` from then on raises `Unavailable`."""

    def __init__(
        self,
        engine: Engine,
        on_events: Callable[[list[Event]], None],
        *,
        on_failure: Callable[[Exception], None] | None = None,
        loop: asyncio.AbstractEventLoop | None = None,
        name: str = "engine",
    ) -> None:
        self.engine = engine
        self._on_events = on_events
        self._on_failure = on_failure
        self._loop = loop
        self._wake = threading.Condition()
        self._calls: deque[tuple[asyncio.Future[Any], Callable[[], Any]]] = deque()
        self._stopping = False
        self._failure: Exception | None = None
        self._stats = engine.stats()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Start the thread; from then on the engine belongs to it."""
        self._loop = self._loop or asyncio.get_running_loop()
        self._thread.start()

    @property
    def stats(self) -> EngineStats:
        """As of the end of the last step or call; from any thread, at no cost."""
        return self._stats

    @property
    def failure(self) -> Exception | None:
        """What ended the engine, None while it lives."""
        return self._failure

    async def call(self, fn: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run `fn(*args)` in the engine's thread between two steps; its result or its exception.

        The function runs even if the caller is cancelled while it waits: a release is never
        lost, and an admission whose caller is gone can be released by key afterwards. Raises
        `Unavailable` when the engine has ended."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()
        with self._wake:
            if self._stopping or self._failure is not None:
                raise Unavailable("the engine of this replica has ended")
            self._calls.append((future, lambda: fn(*args, **kwargs)))
            self._wake.notify()
        return await future

    async def stop(self) -> None:
        """Run the calls that were made before, end the thread and wait for it. No further step
        is run; idempotent."""
        with self._wake:
            self._stopping = True
            self._wake.notify()
        if self._thread.is_alive():
            await asyncio.to_thread(self._thread.join)

    # ---- the engine's thread ---------------------------------------------------------------

    def _run(self) -> None:
        while True:
            with self._wake:
                while not (self._calls or self._stopping or self.engine.has_work):
                    self._wake.wait()
                calls, self._calls = self._calls, deque()
                stopping = self._stopping
            for future, fn in calls:
                self._answer(future, fn)
            if stopping:
                return
            try:
                events = self.engine.step()
                self._stats = self.engine.stats()
            except Exception as error:
                self._fail(error)
                return
            if events:
                self._post(self._on_events, list(events))

    def _answer(self, future: asyncio.Future[Any], fn: Callable[[], Any]) -> None:
        try:
            result = fn()
        except Exception as error:
            self._post(_settle, future, None, error)
        else:
            self._stats = self.engine.stats()
            self._post(_settle, future, result, None)

    def _fail(self, error: Exception) -> None:
        _log.exception("the engine ended")
        with self._wake:
            self._failure = error
            calls, self._calls = self._calls, deque()
        for future, _ in calls:
            self._post(_settle, future, None, Unavailable("the engine of this replica has ended"))
        if self._on_failure is not None:
            self._post(self._on_failure, error)

    def _post(self, fn: Callable[..., None], *args: object) -> None:
        assert self._loop is not None  # start() set it
        try:
            self._loop.call_soon_threadsafe(fn, *args)
        except RuntimeError:
            # The loop was closed under us: nobody is left to hear it.
            _log.warning("the event loop is closed; %s is not delivered", fn.__name__)


def _settle(future: asyncio.Future[Any], result: Any, error: Exception | None) -> None:
    if future.cancelled():
        return
    if error is not None:
        future.set_exception(error)
    else:
        future.set_result(result)
