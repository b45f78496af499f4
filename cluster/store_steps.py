"""What the commands of `headrace store` have in common: opening, listing, choosing, showing."""

from __future__ import annotations

import contextlib
import json
import math
import re
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NoReturn

import typer
from rich.console import Console, RenderableType
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from headrace.cluster.stores import Target
from headrace.core.errors import ConfigError, HeadraceError
from headrace.kvstore.layout import domain_tag
from headrace.kvstore.pins import read_pins
from headrace.kvstore.questions import Topic
from headrace.kvstore.segment_names import segment_paths
from headrace.kvstore.workshop import carry, live, repair
from headrace.kvstore.workshop.directory import StoreDirectory
from headrace.kvstore.workshop.garbage import Wishes
from headrace.kvstore.workshop.live_import import import_file
from headrace.kvstore.workshop.repair import Findings
from headrace.kvstore.workshop.shipping import PrefixFile
from headrace.kvstore.workshop.survey import Chain, Seen, chains, find_tip, plain, sums

out = Console(highlight=False, soft_wrap=True, emoji=False)
err = Console(stderr=True, highlight=False, soft_wrap=True, emoji=False)
NAMESPACE_DIGITS = 8  # a whole namespace may go by them
MAX_ROWS = 10_000  # chains that a running store names at once
_TIMES_S = {"s": 1, "m": 60, "h": 3600, "d": 86_400}


def findings_values(found: Findings) -> dict[str, Any]:
    """As plain values, places included, up to 1,000 of them."""
    return {
        "read": found.read,
        "objects": found.objects,
        "payload_bytes": found.payload_bytes,
        "damaged": found.damaged,
        "damaged_segments": list(found.damaged_segments),
        "short_segments": list(found.short_segments),
        "flaws": found.counts(),
        "places": [
            {"segment": place.segment, "slot": place.slot, "flaw": flaw.value, "bytes": n}
            for place, flaw, n in found.flaws[:1000]
        ],
    }


def live_findings(found: dict[str, int]) -> dict[str, Any]:
    """What a running store found, in the words of `findings_values`."""
    damaged = found["damaged"]
    return {
        "read": found["objects"] + damaged,
        "objects": found["objects"],
        "payload_bytes": found["payload_bytes"],
        "damaged": damaged > 0,
        "damaged_segments": [],
        "short_segments": [],
        "flaws": {"payload": damaged} if damaged else {},
        "places": [],
    }


def seen_in(files: StoreDirectory) -> list[Seen]:
    """Every object of a directory."""
    return [
        Seen(header.facts, header.written_at_s, False, True)
        for _, header in files.objects().values()
    ]


def stat_of(target: Target) -> dict[str, Any]:
    """What `stat` says of a running store or of a directory, as plain values."""
    if target.live is None:
        return stat_of_files(target)
    values = live.stat(target.live)
    return values | {"sums": named(values["sums"], target.domains)}


def stat_of_files(target: Target) -> dict[str, Any]:
    """What `stat` says of a directory, as plain values."""
    with StoreDirectory(target.directory) as files:
        seen = seen_in(files)
        heads = [segment.header for segment in files.segments]
        segments = {
            "files": len(heads),
            "free": sum(s.blank or bool(s.header and not s.header.kind) for s in files.segments),
            "damaged": sum(s.header is None and not s.blank for s in files.segments),
            "short": sum(s.short for s in files.segments),
            "file_bytes": sum(segment.size_bytes for segment in files.segments),
        }
    return {
        "store": None,
        "segments": segments,
        "sums": plain(sums(seen, target.domains)),
        "chains": len(chains(seen)),
        "pins": {"pins": [asdict(pin) for pin in read_pins(target.directory)]},
    }


def chains_of(target: Target, limit: int) -> tuple[list[dict[str, Any]], int]:
    """The newest chains and how many there are, of a running store or a directory."""
    if target.live is not None:
        values = live.ask(target.live, Topic.CHAINS, limit=limit)
        return named(values["chains"], target.domains), values["total"]
    with StoreDirectory(target.directory) as files:
        rows = chains(seen_in(files), target.domains)
    return plain(rows), len(rows)


def named(rows: list[dict[str, Any]], names: Iterable[str]) -> list[dict[str, Any]]:
    """Rows of a running store, with names where it could only give the first digits of tags."""
    known = {domain_tag(name).hex()[:12]: name for name in names}
    return [row | {"domain": known.get(row["domain"], row["domain"])} for row in rows]


def pick_chains(
    rows: list[Chain], starts: list[str], everything: bool, namespace: str
) -> list[Chain]:
    """The chains that are meant, all of one namespace. Raises `ConfigError` saying what to add."""
    if everything == bool(starts):
        raise ConfigError("name chains by --tip, as `headrace store ls` shows them, or take --all")
    picked = rows
    if namespace:
        meant = pick_namespace(namespace, {row.namespace for row in rows}).hex()
        picked = [row for row in rows if row.namespace == meant]
    if starts:
        chosen = []
        for start in starts:
            tips = find_tip(start, (row.tip for row in picked))
            if len(tips) != 1:
                found = str(len(tips) or "none")
                raise ConfigError(f"--tip {start}: {found} of the whole chains here begin so")
            chosen.append(tips[0])
        picked = [row for row in picked if row.tip in chosen]
    if not picked:
        raise ConfigError("there is no whole chain here that this names")
    spaces = sorted({row.namespace[:16] for row in picked})
    if len(spaces) > 1:
        raise ConfigError(
            f"chains of one namespace at a time; say --namespace, of {', '.join(spaces)}"
        )
    return picked


def pick_namespace(start: str, known: Iterable[str]) -> bytes:
    """The namespace (of `known`, in hex) that is meant by its first digits, at least
    `NAMESPACE_DIGITS`. Raises `ConfigError`."""
    if len(start) < NAMESPACE_DIGITS:
        least = f"--namespace must have at least {NAMESPACE_DIGITS} digits"
        raise ConfigError(f"{least}, got {start!r}")
    found = find_tip(start, known)
    if len(found) != 1:
        there = ", ".join(one[:16] for one in sorted(known)) or "none"
        raise ConfigError(
            f"--namespace {start[:80]}: {len(found) or 'none'} of the namespaces here begin so"
            f" ({there})"
        )
    return bytes.fromhex(found[0])


def namespaces_of(target: Target) -> set[str]:
    """The namespaces, in hex, of all that is stored."""
    if target.live is not None:
        answer = live.ask(target.live, Topic.LAYOUT, namespace=bytes(32).hex())
        return set(answer["namespaces"])
    with StoreDirectory(target.directory) as files:
        return {seen.facts.namespace.hex() for seen in seen_in(files)}


@dataclass(frozen=True, slots=True)
class Wanted:
    """Chains that an export is to hold, as the command line names them."""

    tips: list[str]
    everything: bool
    namespace: str

    def of(self, rows: Iterable[Chain]) -> tuple[bytes, list[bytes]]:
        """Namespace and tips. Raises `ConfigError` saying what to add."""
        whole = [row for row in rows if row.whole]
        picked = pick_chains(whole, self.tips, self.everything, self.namespace)
        return bytes.fromhex(picked[0].namespace), [bytes.fromhex(row.tip) for row in picked]


def export_from(
    target: Target, wanted: Wanted, file: Path, *, force: bool
) -> tuple[PrefixFile, int]:
    """Write a prefix file out of a running store or a directory; how many chains are in it."""
    if target.live is not None:
        rows = (Chain(**row) for row in chains_of(target, MAX_ROWS)[0])
        namespace, tips = wanted.of(rows)
        with bar("export") as step:
            about = live.export_chains(
                target.live, target.directory, namespace, tips, file, step, force=force
            )
        return about, len(tips)
    with StoreDirectory(target.directory) as files:
        namespace, tips = wanted.of(chains(seen_in(files), target.domains))
        with bar("export") as step:
            about = carry.export_chains(files, namespace, tips, file, step, force=force)
    return about, len(tips)


def import_into(target: Target, file: Path, *, force: bool) -> carry.Imported:
    """Read a prefix file into a running store or a directory."""
    with bar("import") as step:
        if target.live is not None:
            return import_file(target.live, target.directory, file, step, force=force)
        if not segment_paths(target.directory):
            raise ConfigError(
                f"there is no store in {target.directory} yet, and only its configuration says how"
                " large it is to be: put the `salt` file of the exporting store there, start it"
                " (`headrace up`), and import then; a running store takes a file, too"
            )
        with StoreDirectory(target.directory) as files:
            return carry.import_file(files, file, step, force=force)


def garbage_of(target: Target, wishes: Wishes, *, dry_run: bool, index: bool) -> dict[str, Any]:
    """Clean up a running store or a directory: what went, as plain values. Raises `ConfigError`."""
    if target.live is not None:
        values = live.clean(target.live, wishes, dry_run=dry_run)
        return values | ({"index": live.sweep(target.live)} if index and not dry_run else {})
    if index:
        target.must_be_live("gc --index")
    with bar("gc") as step, StoreDirectory(target.directory) as files:
        found = repair.find_garbage(files, wishes, step)
        if not dry_run:
            repair.erase(files, found)
        over = repair.end_pins(target.directory, time.time(), dry_run=dry_run)
    return findings_values(found) | {"pins_ended": [one.name for one in over]}


def seconds(text: str, option: str) -> int:
    """`90m`, `36h`, `7d` in seconds. Raises `ConfigError` naming the option."""
    found = re.fullmatch(r"(\d{1,6})([smhd])", text)
    if found is None:
        raise ConfigError(f"{option} must be a number with s, m, h or d, got {text[:40]!r}")
    return int(found[1]) * _TIMES_S[found[2]]


@contextlib.contextmanager
def bar(what: str) -> Iterator[Callable[[int, int], None]]:
    """A progress bar on standard error; quick steps show none that stays."""
    columns = (
        TextColumn(what),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=err, transient=True) as progress:
        task = progress.add_task(what, total=None)
        shown_s = 0.0

        def step(done: int, total: int) -> None:
            nonlocal shown_s
            now_s = time.monotonic()
            if done == total or now_s - shown_s > 0.05:  # an update costs more than a slot
                progress.update(task, completed=done, total=total)
                shown_s = now_s

        yield step


def show(values: Any, words: RenderableType, as_json: bool) -> None:
    """Print for people, or as JSON."""
    if as_json:
        out.print_json(json.dumps(_finite(values), allow_nan=False))
        return
    if not out.is_terminal:
        out.width = 160  # piped: nobody's window to fit into
    out.print(words)


def _finite(values: Any) -> Any:
    """With null for what JSON has no number for."""
    if isinstance(values, dict):
        return {name: _finite(value) for name, value in values.items()}
    if isinstance(values, list | tuple):
        return [_finite(value) for value in values]
    return None if isinstance(values, float) and not math.isfinite(values) else values


@contextlib.contextmanager
def said() -> Iterator[None]:
    """Refusals become one line and exit status 2; damage that was found is 1."""
    try:
        yield
    except (HeadraceError, OSError) as error:
        _fail(error.message if isinstance(error, HeadraceError) else str(error))


def _fail(message: str) -> NoReturn:
    err.print(f"[bold red]headrace:[/] {escape(message)}")
    raise typer.Exit(2)
