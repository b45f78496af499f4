"""Tasks are ended, also when a cancellation is lost and when one leaves another behind."""

from __future__ import annotations

import asyncio

from headrace.core.tasks import end_tasks


async def test_a_task_that_loses_a_cancellation_is_cancelled_again() -> None:
    lost = []

    async def stubborn() -> None:
        for _ in range(2):
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                lost.append("cancel")
        await asyncio.Event().wait()

    task = asyncio.create_task(stubborn())
    await asyncio.sleep(0)
    await end_tasks(lambda: (task, None))
    assert task.cancelled() and lost == ["cancel", "cancel"]


async def test_one_that_is_started_by_the_end_of_another_ends_too() -> None:
    running: list[asyncio.Task[None]] = []

    async def last() -> None:
        await asyncio.Event().wait()

    async def first() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            running.append(asyncio.create_task(last()))

    running.append(asyncio.create_task(first()))
    await asyncio.sleep(0)
    await end_tasks(lambda: running)
    assert len(running) == 2 and all(task.cancelled() for task in running)
    await end_tasks(lambda: running)  # nobody is left: returns at once
