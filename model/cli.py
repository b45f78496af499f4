"""`headrace model inspect|convert|random` and `headrace layout`: commands to be mounted.

`app` holds all four; `layout` alone is a plain function for a top-level command.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from headrace.core.errors import HeadraceError
from headrace.model.checkpoint import (
    Checkpoint,
    CheckpointError,
    Quantisation,
    ReleaseConfig,
    Selection,
    convert,
    read_config,
    released_quantisation,
    tensors_digest,
    totals_by_part,
    write_random,
)
from headrace.model.checkpoint.load import TOKENIZER_NAME
from headrace.model.checkpoint.progress import progress_bar
from headrace.model.checkpoint.shards import CONFIG_NAME, read_json
from headrace.model.checkpoint.synthetic import stored_bytes
from headrace.model.checkpoint.writer import DEFAULT_SHARD_BYTES, DIGEST_KEY, companions_of
from headrace.model.config import ModelConfig
from headrace.model.errors import ConfigError
from headrace.model.named import package_tokenizer
from headrace.model.report import layout_report
from headrace.model.report_views import as_json, draw_png, show_bytes, tables

app = typer.Typer(
    name="model",
    help="Look at, convert and make checkpoints; print what a model's state weighs.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_show_locals=False,
)
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*(|B|kB|MB|GB|TB|KiB|MiB|GiB|TiB)")
_POWERS = {"": 0, "B": 0, "k": 1, "K": 1, "M": 2, "G": 3, "T": 4}

ModelName = Annotated[
    str,
    typer.Argument(
        metavar="CONFIG",
        help="A model of the package (flash, v4-flash, ..), a config.json or a checkpoint.",
        show_default=False,
    ),
]
Folder = Annotated[Path, typer.Argument(help="Checkpoint folder.", show_default=False)]
NewFolder = Annotated[Path, typer.Argument(help="Folder to create.", show_default=False)]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON on standard output.")]
ShardSize = Annotated[
    str, typer.Option("--max-shard", help="Most bytes of tensors in a file, e.g. 5GB.")
]
Prefix = Annotated[bool, typer.Option("--prefix", help="Write names with a leading `model.`.")]
Block = Annotated[
    int | None,
    typer.Option("--block", help="Side of a dense FP8 block: 32 or 128; as released by default."),
]
Experts = Annotated[str, typer.Option("--experts", help="Routed experts: fp4 or fp8.")]
Plain = Annotated[bool, typer.Option("--bf16", help="Do not quantise at all.")]


def parse_bytes(text: str, option: str) -> int:
    """`141GB`, `80GiB`, `5000`: kB is 1,000 and KiB is 1,024. Raises ConfigError."""
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise ConfigError(f"{option}: found {text!r}, wanted a size such as 141GB or 80GiB")
    number, unit = match[1], match[2]
    base = 1024 if "i" in unit else 1000
    return int(float(number) * base ** _POWERS[unit[:1]])


@contextmanager
def _refusals() -> Iterator[None]:
    """Expected errors become one line on standard error and exit status 1."""
    try:
        yield
    except HeadraceError as error:
        Console(stderr=True, soft_wrap=True, highlight=False).print(
            f"[red]error:[/red] {escape(error.message)}"
        )
        raise typer.Exit(1) from None


def _print_json(value: dict[str, Any]) -> None:
    typer.echo(json.dumps(value, indent=2))


def _console() -> Console:
    console = Console(highlight=False)
    # A pipe has no width of its own, and a cut table is of no use to a program.
    return console if console.is_terminal else Console(highlight=False, width=200)


def _release(name: str) -> ReleaseConfig:
    """A package model (quantised as released), a configuration file or a checkpoint's."""
    path = Path(name)
    if path.is_dir():
        return read_config(read_json(path / CONFIG_NAME))
    if name.endswith(".json") or "/" in name:
        return read_config(read_json(path))
    config = ModelConfig.load(name)
    return ReleaseConfig(config, released_quantisation(config))


def _quantisation(
    config: ModelConfig, block: int | None, experts: str, plain: bool
) -> Quantisation | None:
    side = released_quantisation(config).weight_block[0] if block is None else block
    return None if plain else Quantisation((side, side), experts)


def _check_target(folder: Path, n_bytes: int) -> None:
    """Refuse before any work: a folder that exists, a disk that is too full."""
    if folder.exists():
        raise ConfigError(f"{folder.name}: exists already; name a new folder or remove it")
    place = folder.absolute().parent
    while not place.exists():
        place = place.parent
    free = shutil.disk_usage(place).free
    if n_bytes > free:
        raise ConfigError(
            f"{folder.name}: needs {show_bytes(n_bytes)} of disk, {show_bytes(free)} are free"
        )


@app.command()
def layout(
    config: ModelName,
    memory: Annotated[
        str, typer.Option("--memory", help="Memory of one device, e.g. 141GB: show what fits.")
    ] = "",
    tp: Annotated[int, typer.Option("--tp", help="Devices that share the weights.")] = 1,
    backtrack: Annotated[
        int, typer.Option("--backtrack", help="Rows of one verify step: drafts + 1.")
    ] = 6,
    keep: Annotated[
        int, typer.Option("--keep", help="Decoder rows kept in a prefill, at least the window.")
    ] = 140,
    as_json_: AsJson = False,
    png: Annotated[
        Path | None, typer.Option("--png", help="Also draw stacked bars into this file.")
    ] = None,
) -> None:
    """Bytes of a model's state and weights, layer by layer, and what fits into memory."""
    with _refusals():
        release = _release(config)
        report = layout_report(
            release.model,
            parse_bytes(memory, "--memory") if memory else None,
            tp,
            backtrack,
            keep,
            quantisation=release.quantisation,
        )
        if as_json_:
            _print_json(as_json(report))
        else:
            console = _console()
            for table in tables(report):
                console.print(table)
        if png is not None:
            draw_png(report, png)


@app.command()
def inspect(
    folder: Folder,
    values: Annotated[
        bool, typer.Option("--values", help="Decode every weight; refuse values not finite.")
    ] = False,
    verify: Annotated[
        bool, typer.Option("--verify", help="Read all bytes, compare with the index's digest.")
    ] = False,
    as_json_: AsJson = False,
) -> None:
    """Check a checkpoint's index, headers, names, shapes and formats, and say what it holds."""
    with _refusals(), Checkpoint.open(folder, None) as checkpoint:
        if values:
            with progress_bar("decoding", enabled=not as_json_) as report:
                for _ in checkpoint.stream(on_progress=report):
                    pass
        digest = checkpoint.index.metadata.get(DIGEST_KEY)
        if verify:
            with progress_bar("reading", enabled=not as_json_) as report:
                found = tensors_digest(checkpoint, report)
            if digest is not None and digest != found:
                raise CheckpointError(f"{DIGEST_KEY}: found {found}, wanted {digest}")
            digest = found
        facts = _facts(checkpoint, digest if isinstance(digest, str) else None)
        if as_json_:
            _print_json(facts)
        else:
            _console().print(_facts_table(folder.name, facts))


def _facts(checkpoint: Checkpoint, digest: str | None) -> dict[str, Any]:
    parts = totals_by_part(checkpoint.entries)
    quantisation = checkpoint.release.quantisation
    return {
        "shards": len(checkpoint.shards),
        "tensors": sum(total.n_tensors for total in parts.values()),
        "parameters": sum(total.n_parameters for total in parts.values()),
        "bytes": checkpoint.total_bytes,
        "read_bytes": checkpoint.meter.read_bytes,
        "weight_block": None if quantisation is None else list(quantisation.weight_block),
        "expert_dtype": None if quantisation is None else quantisation.expert_dtype,
        DIGEST_KEY: digest,
        "parts": {
            part.value: {
                "tensors": total.n_tensors,
                "parameters": total.n_parameters,
                "bytes": total.n_bytes,
            }
            for part, total in parts.items()
        },
        "selections": {
            selection.value: sum(parts[p].n_bytes for p in selection.parts if p in parts)
            for selection in Selection
        },
    }


def _facts_table(name: str, facts: dict[str, Any]) -> Table:
    block, experts = facts["weight_block"], facts["expert_dtype"]
    kind = "BF16" if block is None else f"FP8 {block[0]}x{block[1]}, experts {experts.upper()}"
    title = f"{escape(name)}: {facts['shards']} shards, {kind}"
    table = Table(title=title)
    table.add_column("part")
    for head in ("tensors", "parameters", "bytes"):
        table.add_column(head, justify="right")
    for part, total in facts["parts"].items():
        table.add_row(part.replace("_", " "), *(f"{value:,}" for value in total.values()))
    table.add_section()
    table.add_row("all", *(f"{facts[key]:,}" for key in ("tensors", "parameters", "bytes")))
    loads = ", ".join(f"{k} {show_bytes(v)}" for k, v in facts["selections"].items())
    table.caption = f"A role loads: {loads}.\n{DIGEST_KEY} {facts[DIGEST_KEY] or 'not recorded'}"
    return table


@app.command("convert")
def convert_command(
    source: Folder,
    target: NewFolder,
    parts: Annotated[
        Selection, typer.Option("--parts", help="What to take along.")
    ] = Selection.FULL,
    max_shard: ShardSize = f"{DEFAULT_SHARD_BYTES >> 30}GiB",
    prefix: Prefix = False,
    block: Block = None,
    experts: Experts = "fp4",
    bf16: Plain = False,
    as_json_: AsJson = False,
) -> None:
    """Rewrite a checkpoint: nested config, other shards, parts or formats.

    The target has the release's formats unless told otherwise; weights that are in theirs already
    are copied byte for byte.
    """
    with _refusals(), Checkpoint.open(source, parts) as checkpoint:
        config = checkpoint.release.model
        release = ReleaseConfig(config, _quantisation(config, block, experts, bf16))
        _check_target(target, stored_bytes(release, parts))
        with progress_bar("writing", enabled=not as_json_) as report:
            digest = convert(
                checkpoint,
                target,
                release,
                max_shard_bytes=parse_bytes(max_shard, "--max-shard"),
                prefix="model." if prefix else "",
                companions=companions_of(source),
                on_progress=report,
            )
        _written(target, digest, as_json_)


@app.command("random")
def random_command(
    config: ModelName,
    target: NewFolder,
    seed: Annotated[int, typer.Option("--seed", help="Same seed, same bytes.")] = 0,
    parts: Annotated[Selection, typer.Option("--parts", help="What to write.")] = Selection.FULL,
    max_shard: ShardSize = f"{DEFAULT_SHARD_BYTES >> 30}GiB",
    prefix: Prefix = False,
    block: Block = None,
    experts: Experts = "fp4",
    bf16: Plain = False,
    tokenizer: Annotated[
        Path | None,
        typer.Option("--tokenizer", help="tokenizer.json to put beside the weights."),
    ] = None,
    as_json_: AsJson = False,
) -> None:
    """Write a checkpoint of random weights with the real names, formats and index.

    Without --tokenizer the package's tokenizer of that vocabulary goes along, if there is one.
    """
    with _refusals():
        model = _release(config).model
        release = ReleaseConfig(model, _quantisation(model, block, experts, bf16))
        _check_target(target, stored_bytes(release, parts))
        with progress_bar("writing", enabled=not as_json_) as report:
            digest = write_random(
                target,
                release,
                seed,
                selection=parts,
                max_shard_bytes=parse_bytes(max_shard, "--max-shard"),
                prefix="model." if prefix else "",
                companions=_tokenizer(tokenizer, release.model.vocab_size),
                on_progress=report,
            )
        _written(target, digest, as_json_)


def _tokenizer(path: Path | None, vocab_size: int) -> dict[str, bytes]:
    if path is not None:
        if not path.is_file():
            raise ConfigError(f"--tokenizer: {path.name} does not exist")
        return {TOKENIZER_NAME: path.read_bytes()}
    try:
        text = package_tokenizer(vocab_size).to_str()
    except ConfigError:  # none of that size: the checkpoint goes without
        return {}
    return {TOKENIZER_NAME: text.encode()}


def _written(folder: Path, digest: str, as_json_: bool) -> None:
    with Checkpoint.open(folder, None) as checkpoint:  # what was written reads
        facts = _facts(checkpoint, digest)
    if as_json_:
        _print_json(facts)
    else:
        _console().print(_facts_table(folder.name, facts))


if __name__ == "__main__":
    app()
