"""Ending tasks for certain."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable

_AGAIN_S = 0.05


async def end_tasks(tasks: Callable[[], Iterable[asyncio.Task[None] | None]]) -> None:
    """Cancel what `tasks()` names until all of it is done; None is nobody. It is asked anew each
    round, since one that ends may have started another. What they raised is left to who asks."""
    while busy := [task for task in tasks() if task is not None and not task.done()]:
        # Again, because a cancellation can be lost on the way (seen: wait_for of Python 3.11).
        for task in busy:
            task.cancel()
        await asyncio.wait(busy, timeout=_AGAIN_S)
