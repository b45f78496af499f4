"""What `headrace store` prints for people."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from headrace.cluster.status import store_table
from headrace.kvstore import Kind

KINDS = {Kind.KV: "block", Kind.SWA: "window record", Kind.MM: "picture", Kind.STATE: "state"}
TAGS = (
    "domain: twelve hex digits are a tag, since a store keeps tags of domains, not names; with"
    " --name the cluster's configuration says whose they are"
)


def size(n_bytes: float) -> str:
    """Bytes for people, kB being 1,000."""
    for unit, power in (("GB", 9), ("MB", 6), ("kB", 3)):
        if n_bytes >= 10**power:
            return f"{n_bytes / 10**power:.1f} {unit}"
    return f"{n_bytes:.0f} B"


def age(written_at_s: float) -> str:
    """How long ago, in the largest unit that says something."""
    seconds = max(0.0, time.time() - written_at_s)
    for unit, length_s in (("d", 86_400), ("h", 3_600), ("min", 60)):
        if seconds >= length_s:
            return f"{seconds / length_s:.0f} {unit}"
    return f"{seconds:.0f} s"


def sums_table(rows: Sequence[Mapping[str, Any]], nameless: bool) -> RenderableType:
    """`nameless`: nobody knew the names behind the tags of domains."""
    if not rows:
        return Text("nothing is stored")
    table = Table(title="objects", title_justify="left")
    for column in ("kind", "namespace", "domain", "objects", "in memory", "on disk", "bytes"):
        numbers = column not in ("kind", "namespace", "domain")
        table.add_column(column, justify="right" if numbers else "left")
    for row in rows:
        table.add_row(
            KINDS[Kind(row["kind"])],
            row["namespace"],
            row["domain"],
            f"{row['objects']:,}",
            f"{row['host_objects']:,}",
            f"{row['ssd_objects']:,}",
            size(row["payload_bytes"]),
        )
    return _with_note(table, nameless)


def chains_table(
    rows: Sequence[Mapping[str, Any]], total: int, nameless: bool = False
) -> RenderableType:
    if not rows:
        return Text("no chain is stored")
    note = (
        f"{len(rows)} of {total}, newest first" if len(rows) < total else f"{total}, newest first"
    )
    table = Table(title=f"chains: {note}", title_justify="left")
    for column in ("tip", "domain", "namespace", "tokens", "windows", "bytes", "age", "whole"):
        numbers = column in ("tokens", "windows", "bytes", "age")
        table.add_column(column, justify="right" if numbers else "left")
    for row in rows:
        table.add_row(
            row["tip"][:16],
            row["domain"],
            row["namespace"][:16],
            f"{row['tokens']:,}",
            str(row["windows"]),
            size(row["payload_bytes"]),
            age(row["written_at_s"]),
            _whole(row),
        )
    return _with_note(table, nameless)


def _whole(row: Mapping[str, Any]) -> str:
    if row["behind_exact"]:
        return "behind exact"  # its head is a chain of another namespace
    return "yes" if row["whole"] else "[red]no[/]"


def _with_note(table: Table, nameless: bool) -> RenderableType:
    return Group(table, Text(TAGS)) if nameless else table


def stat_view(values: Mapping[str, Any], nameless: bool = False) -> RenderableType:
    """What `stat` says, of a running store or of a directory."""
    parts: list[RenderableType] = []
    if values.get("store"):
        parts.append(store_table(values["store"]))
        parts += [Text(line) for line in _memory(values["store"]["arena_lock"])]
    if values.get("segments"):
        of = values["segments"]
        parts.append(
            Text(
                f"{of['files']} segments ({size(of['file_bytes'])}), {of['free']} unused,"
                f" {of['damaged']} with a damaged header, {of['short']} that end too soon"
            )
        )
    parts.append(sums_table(values["sums"], nameless))
    parts.append(Text(f"chains: {values['chains']} (`headrace store ls`)"))
    parts += [Text(line) for line in _pins(values["pins"])]
    if values.get("economics"):
        parts.append(Text(_economics(values["economics"])))
    return Group(*parts)


def _memory(lock: str) -> Iterator[str]:
    """Only what an operator might want to change."""
    if lock == "refused":
        yield (
            "memory: may be swapped out, mlock was refused; raise RLIMIT_MEMLOCK above the arena"
            " (the store's log has both), or say store.lock_memory: false"
        )


def _pins(pins: Mapping[str, Any]) -> Iterator[str]:
    for pin in pins["pins"]:
        left_s = pin["expires_at_s"] - time.time()
        yield f"pin {pin['name']}: {pin['tip'][:16]}, {max(0.0, left_s) / 3600:.1f} h left"
    if pins["pins"] and pins.get("quota_bytes") is not None:
        yield f"pins hold {size(pins['held_bytes'])} of {size(pins['quota_bytes'])}"


def _economics(of: Mapping[str, Any]) -> str:
    if not of["hits"]:
        return "hits: none in the store yet (what a replica still had itself is not counted)"
    requests = "1 request" if of["hits"] == 1 else f"{of['hits']:,} requests"
    found = (
        f"hits: {requests} found {of['found_tokens']:,} tokens in the store;"
        f" {of['saved_rows']:,} rows not run"
    )
    if of["row_s"] is None:
        again = f", {of['again_rows']:,} run twice" if of["again_rows"] else ""
        return (
            f"{found}{again}, {of['load_s']:.2f} s load and verify; what a row costs is known once"
            " a prefill replica has run some, until then nothing counts as saved"
        )
    again = f", {of['replay_s']:.2f} s for {of['again_rows']:,} rows run twice"
    return (
        f"{found} x {1000 * of['row_s']:.2f} ms = {of['saved_s']:.2f} s saved,"
        f" less {of['load_s']:.2f} s load and verify{again if of['again_rows'] else ''}:"
        f" {of['net_s']:+.2f} s"
    )


def walk_view(values: Mapping[str, Any], verb: str) -> RenderableType:
    """What `verify` and `scrub` found."""
    first = (
        f"{values['read']:,} objects read, {values['objects']:,} sound"
        f" ({size(values['payload_bytes'])})"
    )
    return Text("\n".join([first, *_flaws(values, verb)]))


def garbage_view(values: Mapping[str, Any]) -> RenderableType:
    """What `gc` found; it reads headers only."""
    dry = values["dry_run"]
    kept = f"{values['objects']:,} stay ({size(values['payload_bytes'])})"
    lines = [f"{values['read']:,} objects looked at, {kept}"]
    lines += _flaws(values, "would go" if dry else "removed")
    lines += [
        f"pin {name}: its time is over{': would go' if dry else ': removed'}"
        for name in values["pins_ended"]
    ]
    if "index" in values:
        swept = values["index"]
        lines.append(f"{swept['records']:,} records of {swept['stores']} stores that are gone")
    if not values["flaws"] and not values["pins_ended"]:
        lines.append("nothing to remove")
    return Text("\n".join(lines))


def _flaws(values: Mapping[str, Any], verb: str) -> Iterator[str]:
    if values["damaged_segments"]:
        numbers = ", ".join(map(str, values["damaged_segments"]))
        yield f"segment {numbers}: damaged header; `headrace store rebuild-index` makes it anew"
    if values["short_segments"]:
        numbers = ", ".join(map(str, values["short_segments"]))
        yield (
            f"segment {numbers}: the file ends before its slots do, what stood there is lost;"
            " `headrace store scrub` gives it its length again"
        )
    words = {
        "payload": "do not match their checksum",
        "unreadable": "cannot be read",
        "duplicate": "older copies of what is stored twice",
        "orphan": "hang on blocks that are not stored",
        "unwanted": "to go by their age, namespace or domain",
    }
    for flaw, count in values["flaws"].items():
        yield f"{count:,} {words[flaw]}{': ' + verb if verb else ''}"


def trial_table(values: Mapping[str, Any]) -> Table:
    table = Table(
        title=f"{values['blocks']:,} blocks of {values['block_bytes']:,} bytes, one client",
        title_justify="left",
    )
    for column in ("", "MB/s", "of a bare file"):
        table.add_column(column, justify="right" if column else "left")
    rows = (
        ("bare file, write + sync", "bare_write", "bare_write"),
        ("bare file, read", "bare_read", "bare_read"),
        ("put, until readable", "put_host", ""),
        ("put, until durable", "put_ssd", "bare_write"),
        ("get from memory", "get_host", ""),
        ("get from disk", "get_ssd", "bare_read"),
    )
    for words, name, base in rows:
        ratio = f"{values[name] / values[base]:.2f}" if base else ""
        table.add_row(words, f"{values[name] / 1e6:,.0f}", ratio)
    return table
