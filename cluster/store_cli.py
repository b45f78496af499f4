"""`headrace store`: look into a store, repair it, carry prefixes, and measure a disk.

A running store is asked; a directory that nobody serves is opened.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from headrace.cluster.help_text import unwrap
from headrace.cluster.store_steps import (
    Wanted,
    bar,
    chains_of,
    err,
    export_from,
    findings_values,
    garbage_of,
    import_into,
    live_findings,
    namespaces_of,
    pick_chains,
    pick_namespace,
    said,
    seconds,
    show,
    stat_of,
)
from headrace.cluster.store_views import (
    chains_table,
    garbage_view,
    stat_view,
    trial_table,
    walk_view,
)
from headrace.cluster.stores import economics, economics_values, find_target
from headrace.core.errors import ConfigError
from headrace.kvstore.layout import domain_tag
from headrace.kvstore.questions import Topic
from headrace.kvstore.workshop import live, repair
from headrace.kvstore.workshop.directory import StoreDirectory
from headrace.kvstore.workshop.garbage import Wishes
from headrace.kvstore.workshop.survey import Chain

app = typer.Typer(
    name="store",
    help="Look into a KV store, repair it, carry prefixes between stores. Works on the store of a"
    " running cluster, or on a directory that nobody serves.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_show_locals=False,
)

Directory = Annotated[
    Path | None,
    typer.Argument(
        help="The store's directory, served by nobody. Default: the store of the cluster.",
        show_default=False,
    ),
]
Name = Annotated[
    str, typer.Option("--name", help="Name of the cluster. Default: the only one there is.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON on standard output.")]
Tips = Annotated[
    list[str] | None,
    typer.Option("--tip", help="First digits of a chain's tip, as `ls` shows it; may be repeated."),
]


@app.command()
def stat(directory: Directory = None, name: Name = "", as_json: AsJson = False) -> None:
    """Say how much is stored: by tier, kind, namespace and domain; pins; and whether hits pay."""
    with said():
        target = find_target(directory, name)
        values = stat_of(target)
        values["economics"] = economics_values(economics(target.run))
        show(values, stat_view(values, not target.domains), as_json)


@app.command()
def ls(
    directory: Directory = None,
    name: Name = "",
    limit: Annotated[int, typer.Option(help="Most chains to list.", min=1, max=10_000)] = 50,
    as_json: AsJson = False,
) -> None:
    """List stored chains by their last block, the newest first."""
    with said():
        target = find_target(directory, name)
        rows, total = chains_of(target, limit)
        shown = rows[:limit]
        table = chains_table(shown, total, not target.domains)
        show({"chains": shown, "total": total}, table, as_json)


@app.command()
def verify(directory: Directory = None, name: Name = "", as_json: AsJson = False) -> None:
    """Read every object back and check it. Changes nothing; exit status 1 if one is damaged."""
    _walk(directory, name, as_json, "verify", repair.verify, "")


@app.command()
def scrub(directory: Directory = None, name: Name = "", as_json: AsJson = False) -> None:
    """Read every object back and remove what is damaged."""
    _walk(directory, name, as_json, "scrub", repair.scrub, "removed")


@app.command("rebuild-index")
def rebuild_index(directory: Directory = None, name: Name = "", as_json: AsJson = False) -> None:
    """Make the index anew. A running store writes all its records to Redis again, while serving
    goes on. In a directory, damaged headers of segments are made anew from their slots (without
    any, the segment is unused again); the store writes its records when it starts."""
    values: dict[str, Any]
    with said():
        target = find_target(directory, name)
        if target.live is not None:
            with bar("rebuild-index") as step:
                values = live.rebuild_index(target.live, step)
            left = values["waiting"]
            words = f"the records of {values['objects'] - left:,} objects were written anew" + (
                f", {left:,} wait for Redis" if left else ""
            )
        else:
            with bar("rebuild-index") as step, StoreDirectory(target.directory) as files:
                made = repair.rebuild_headers(files, step)
            values = {"segments": made, "objects": sum(made.values())}
            words = f"{len(made)} segments have their header again: {values['objects']:,} objects"
        show(values, words, as_json)
    if values.get("waiting"):
        raise typer.Exit(1)


@app.command()
def gc(
    directory: Directory = None,
    name: Name = "",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would go.")] = False,
    older_than: Annotated[
        str, typer.Option(help="Also chains that nobody wrote to for so long: 36h, 30d.")
    ] = "",
    namespace: Annotated[
        list[str] | None,
        typer.Option(help="Also everything of this namespace, by its first digits as `ls` shows."),
    ] = None,
    domain: Annotated[
        list[str] | None, typer.Option(help="Also everything of this cache domain, by name.")
    ] = None,
    index: Annotated[
        bool,
        typer.Option("--index", help="Of a running store: records of stores that are gone, too."),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Remove what nobody can reach: duplicates, blocks without the blocks before them, pins whose
    time is over. A running store leaves alone what is in use or younger than a minute."""
    with said():
        before_s = int(time.time() - seconds(older_than, "--older-than")) if older_than else 0
        target = find_target(directory, name)
        known = namespaces_of(target) if namespace else ()
        wishes = Wishes(
            before_s,
            frozenset(pick_namespace(text, known) for text in namespace or ()),
            frozenset(domain_tag(text) for text in domain or ()),
        )
        values = garbage_of(target, wishes, dry_run=dry_run, index=index) | {"dry_run": dry_run}
        show(values, garbage_view(values), as_json)
    if values["damaged"]:
        raise typer.Exit(1)


@app.command()
def export(
    file: Annotated[Path, typer.Argument(help="File to write.", show_default=False)],
    directory: Directory = None,
    name: Name = "",
    tip: Tips = None,
    everything: Annotated[bool, typer.Option("--all", help="Every whole chain.")] = False,
    namespace: Annotated[
        str,
        typer.Option(help="Needed if there are chains of several: first digits, as `ls` shows."),
    ] = "",
    force: Annotated[
        bool, typer.Option("--force", help="Replace the file if it is there.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Write chains with their window records into one file (mode 600), to be imported by a store
    with the same salt and model. Not into a store's directory."""
    with said():
        target = find_target(directory, name)
        wanted = Wanted(tip or [], everything, namespace)
        about, n_chains = export_from(target, wanted, file, force=force)
        values = {
            "file": str(file),
            "chains": n_chains,
            "objects": about.objects,
            "payload_bytes": about.payload_bytes,
        }
        words = f"{n_chains} chains, {about.objects:,} objects in {file}"
        show(values, words, as_json)


@app.command("import")
def import_(
    file: Annotated[Path, typer.Argument(help="File to read.", show_default=False)],
    directory: Directory = None,
    name: Name = "",
    new_namespace: Annotated[
        bool, typer.Option("--new-namespace", help="Also if no object here has its namespace.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Verify a whole prefix file, then write what is missing into free slots, of a running store
    too. Pushes nothing off the disk; one that was interrupted may be begun again.

    The file must come from a store with the same salt. It proves that its bytes are those exported,
    not that they were computed honestly: import what you would trust as weights."""
    with said():
        target = find_target(directory, name)
        done = import_into(target, file, force=new_namespace)
        words = (
            f"{done.written:,} objects written, {done.known:,} were there,"
            f" {done.no_room:,} found no free slot"
        )
        if done.unsaved:
            words += f", {done.unsaved:,} are in memory only"
        show(asdict(done), words, as_json)
    if done.no_room:
        err.print(
            "no free slot: start the store once with a larger store.ssd_bytes, or empty whole"
            " segments with `headrace store gc`"
        )
    if done.unsaved:
        err.print("in memory only: the disk failed, or another store has just written them")
    if done.no_room or done.unsaved:
        raise typer.Exit(1)


@app.command()
def warm(
    tips: Annotated[
        list[str] | None, typer.Argument(help="First digits of the tips of chains.")
    ] = None,
    name: Name = "",
    pin: Annotated[str, typer.Option(help="Pin the chain under this name, too.")] = "",
    ttl: Annotated[str, typer.Option(help="How long a pin holds: 90m, 36h, 7d.")] = "24h",
    unpin: Annotated[str, typer.Option(help="End the pin of this name.")] = "",
    as_json: AsJson = False,
) -> None:
    """Bring stored chains into the memory of a running store; pin them to its disk."""
    with said():
        tips = tips or []
        if bool(tips) == bool(unpin) or (pin and len(tips) != 1):
            raise ConfigError("name chains to warm (one with --pin), or an --unpin NAME")
        target = find_target(None, name)
        store = target.must_be_live("warm")
        if unpin:
            values = live.ask(store, Topic.UNPIN, name=unpin)
            words = f"pin {unpin} has ended" if values["ended"] else f"there is no pin {unpin}"
            show(values, words, as_json)
            return
        rows = [Chain(**row) for row in chains_of(target, 10_000)[0]]
        picked = pick_chains([row for row in rows if row.whole], tips, False, "")
        values = {}
        if pin:
            values = live.ask(
                store,
                Topic.PIN,
                name=pin,
                namespace=picked[0].namespace,
                tip=picked[0].tip,
                ttl_s=float(seconds(ttl, "--ttl")),
            )
        with bar("warm") as step:
            there, total = live.warm(
                store,
                bytes.fromhex(picked[0].namespace),
                [bytes.fromhex(row.tip) for row in picked],
                step,
            )
        values |= {"blocks_in_memory": there, "blocks": total}
        words = f"{there:,} of {total:,} blocks are in memory" + (
            f"; pinned as {pin}" if pin else ""
        )
        show(values, words, as_json)


@app.command()
def bench(
    folder: Annotated[Path, typer.Argument(help="Where to measure, e.g. an SSD's mount.")] = Path(),
    blocks: Annotated[int, typer.Option(help="Blocks to store.", min=16, max=100_000)] = 1024,
    block_bytes: Annotated[
        int,
        typer.Option(help="Bytes of one (`headrace layout`).", min=1, max=1 << 24),
    ] = 113_920,
    as_json: AsJson = False,
) -> None:
    """Measure a store of its own in a folder against a bare file there: put and get, memory and
    disk. Takes a few seconds, and leaves nothing behind."""
    from headrace.kvstore.workshop.trial import run_trial

    with said():
        if not folder.is_dir():
            raise ConfigError(f"{folder} is no folder")
        with bar("bench") as step:
            values = asdict(run_trial(folder, blocks, block_bytes, step))
        show(values, trial_table(values), as_json)


def _walk(
    directory: Path | None,
    name: str,
    as_json: bool,
    what: str,
    verb: Callable[[StoreDirectory, repair.Progress], repair.Findings],
    done: str,
) -> None:
    with said():
        target = find_target(directory, name)
        with bar(what) as step:
            if target.live is not None:
                values = live_findings(live.scrub(target.live, drop=bool(done), progress=step))
            else:
                with StoreDirectory(target.directory) as files:
                    values = findings_values(verb(files, step))
        show(values, walk_view(values, done), as_json)
    if values["damaged"]:
        raise typer.Exit(1)


unwrap(app)
