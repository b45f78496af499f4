"""Progress of reading and writing checkpoints: a bar on standard error, or lines in a log."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.progress import Progress as Bar

from headrace.model.checkpoint.reader import OnProgress, Progress

log = logging.getLogger(__name__)

LOG_EVERY_S = 10.0


@contextmanager
def logged_progress(what: str, now: Callable[[], float] = time.monotonic) -> Iterator[OnProgress]:
    """Logs how much is read, at most every `LOG_EVERY_S` seconds and when the block is over; yields
    what to report to."""
    begun = last = now()
    seen: Progress | None = None

    def report(progress: Progress) -> None:
        nonlocal seen, last
        seen = progress
        if now() - last >= LOG_EVERY_S:
            last = now()
            share = 100 * progress.done_bytes // max(1, progress.total_bytes)
            log.info("%s: %d of %d bytes read, %d %%", what, *_bytes(progress), share)

    yield report
    if seen is not None:
        log.info("%s: %d of %d bytes read in %.1f s", what, *_bytes(seen), now() - begun)


def _bytes(progress: Progress) -> tuple[int, int]:
    return progress.done_bytes, progress.total_bytes


@contextmanager
def progress_bar(
    doing: str, *, enabled: bool = True, console: Console | None = None
) -> Iterator[OnProgress]:
    """Shows bytes done, speed and time left while the block runs; yields what to report to."""
    bar = Bar(
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
        TextColumn("[dim]{task.fields[tensor]}"),
        console=console or Console(stderr=True),
        disable=not enabled,
    )
    with bar:
        task = bar.add_task(doing, total=None, tensor="")

        def report(progress: Progress) -> None:
            bar.update(
                task,
                total=progress.total_bytes,
                completed=progress.done_bytes,
                tensor=progress.name,
            )

        yield report
