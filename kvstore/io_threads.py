"""Work in an I/O thread whose failure, of whatever sort, arrives as an ordinary error."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor
from typing import TypeVar

from headrace.core.errors import HeadraceError

T = TypeVar("T")


class ThreadFailed(HeadraceError):
    """An I/O thread failed in an unforeseen way (no memory, a bug); its cause is chained."""

    code = "io_thread_failed"


def guarded(
    work: Callable[[], T],
    known: tuple[type[Exception], ...] = (OSError, HeadraceError),
) -> Callable[[], T]:
    """`work`, raising errors that are `known` as they are and anything else as `ThreadFailed`.

    An asyncio future refuses a StopIteration and then never ends, and a SystemExit or a
    cancellation would end who waits instead of the operation."""

    def run() -> T:
        try:
            return work()
        except known:
            raise
        except BaseException as error:
            raise ThreadFailed(f"{type(error).__name__} in an I/O thread") from error

    return run


async def in_thread(threads: Executor, work: Callable[[], T]) -> T:
    """Run `work` in one of `threads`. Raises what `guarded` does, and `RuntimeError` when the
    threads have been ended."""
    return await asyncio.get_running_loop().run_in_executor(threads, guarded(work))
