"""A scenario: a load, faults that are seen to take effect, and what must be true after it.

    result = await Scenario(
        load=lambda: ask_four(site),
        faults=[kill(pid, when=lambda: site.proxy.seen("BlocksReady") >= 2)],
        checks=[all_texts_right, site.pulse],
    ).run()

While the load runs, each fault in turn waits for its moment, acts, and proves from outside that it
took effect. One that does not (a wrong pid, a point that nobody passes, a frame that never comes)
raises `FaultMissed`: a scenario whose fault missed has shown nothing, whatever its load says.
"""

from __future__ import annotations

import asyncio
import inspect
import os
import signal
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Generic, TypeAlias, TypeVar

from headrace.core import faults as points

T = TypeVar("T")
Condition: TypeAlias = Callable[[], Any]  # true or false, now or awaited
Action: TypeAlias = Callable[[], Any]

POLL_S = 0.005


class FaultMissed(AssertionError):
    """The moment never came, or nothing outside shows that the fault took effect."""


class NoVerify(TypeError):
    """A fault that nobody looks at may never have happened."""


def at_once() -> bool:
    return True


@dataclass(frozen=True)
class Fault:
    """What breaks, when, and how that is seen.

    `act` breaks it; `verify` comes true, looked at from outside, once it is broken; `undo`, if
    there is one, mends it when the scenario is over, however it ended."""

    name: str
    act: Action
    verify: Condition
    when: Condition = at_once
    undo: Action | None = None

    def __post_init__(self) -> None:
        if not callable(self.verify):
            raise NoVerify(f"{self.name}: a fault needs a verify")

    def at(self, when: Condition) -> Fault:
        """The same at another moment."""
        return replace(self, when=when)

    async def happen(self, within_s: float) -> None:
        """Wait for the moment, act, and see it. Raises `FaultMissed`."""
        await until(self.when, within_s, f"{self.name}: its moment never came")
        await _now_or_awaited(self.act())
        await until(self.verify, within_s, f"{self.name}: it took no effect")


@dataclass(frozen=True)
class Scenario(Generic[T]):
    """`load()` runs beside the faults; `checks` get its result, in order, after all undoing."""

    load: Callable[[], Awaitable[T]]
    faults: Sequence[Fault]
    checks: Sequence[Callable[[T], Any]]
    within_s: float = 60.0  # against hangs: of the load, and of each fault

    async def run(self) -> T:
        """The load's result. Raises `FaultMissed`, what the load raises, and failed checks."""
        loading = asyncio.ensure_future(self.load())
        happened: list[Fault] = []
        try:
            for fault in self.faults:
                happened.append(fault)  # before it acts: what half happened is undone too
                await fault.happen(self.within_s)
            async with asyncio.timeout(self.within_s):
                result = await loading
        finally:
            for fault in reversed(happened):
                if fault.undo is not None:
                    await _now_or_awaited(fault.undo())
            loading.cancel()
            await asyncio.gather(loading, return_exceptions=True)
        for check in self.checks:
            await _now_or_awaited(check(result))
        return result


async def until(condition: Condition, within_s: float, otherwise: str) -> None:
    """Wait for something that others bring about. Raises `FaultMissed(otherwise)`."""
    try:
        async with asyncio.timeout(within_s):
            while not await _now_or_awaited(condition()):
                await asyncio.sleep(POLL_S)
    except TimeoutError:
        raise FaultMissed(f"{otherwise} within {within_s:g} s") from None


async def _now_or_awaited(value: Any) -> Any:
    return await value if inspect.isawaitable(value) else value


# ---- kinds of faults ---------------------------------------------------------------------------


def gone(pid: int) -> bool:
    """No such process, or one that only waits to be collected."""
    return process_state(pid) in ("", "Z", "X")


def process_state(pid: int) -> str:
    """The letter of /proc/<pid>/stat; "" when there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return ""


def kill(pid: int, when: Condition = at_once) -> Fault:
    """SIGKILL; seen by the pid being gone."""
    return Fault(f"kill {pid}", lambda: os.kill(pid, signal.SIGKILL), lambda: gone(pid), when)


def stop(pid: int, when: Condition = at_once) -> Fault:
    """SIGSTOP until the end of the scenario; seen by state T. Its sockets stay open."""

    def go_on() -> None:
        if not gone(pid):
            os.kill(pid, signal.SIGCONT)

    return Fault(
        f"stop {pid}",
        lambda: os.kill(pid, signal.SIGSTOP),
        lambda: process_state(pid) == "T",
        when,
        go_on,
    )


def at_point(spec: str, when: Condition = at_once, times: int = 1) -> Fault:
    """Arm a fault point of this process (`core.faults`); seen by its own count of firings."""
    name = spec.partition("=")[0]
    return Fault(spec, lambda: points.arm(spec), lambda: points.fired(name) >= times, when)


def by_rule(name: str, verify: Condition) -> Fault:
    """What a rule for frames brings about (wire/proxy.py), in force before the load begins; seen by
    the frames that met it."""
    return Fault(name, lambda: None, verify)


def go_on(release: asyncio.Event) -> Fault:
    """Frames that stood still go on."""
    return Fault("frames go on", release.set, release.is_set)


def aimed_elsewhere(fault: Fault, at: Fault) -> Fault:
    """A control: `fault` as it is verified, with the action of the same kind on another target.
    To happen it must raise `FaultMissed`, or its verify looks at nothing."""
    return replace(fault, name=f"{fault.name}, aimed at {at.name}", act=at.act, undo=at.undo)
