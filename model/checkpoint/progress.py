"""A progress bar for reading and writing checkpoints, on standard error."""

from __future__ import annotations

from collections.abc import Iterator
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
