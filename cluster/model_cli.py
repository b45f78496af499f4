"""Options of `headrace layout` and `headrace model inspect|convert|random`.

They are declared apart from what they do (`headrace.model.commands`), which needs torch: to say
which options there are costs a fraction of a second without it, and four with it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from headrace.core.errors import HeadraceError

app = typer.Typer(
    name="model",
    help="Look at, convert and make checkpoints.",
    no_args_is_help=True,
    add_completion=False,
)

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
Parts = Annotated[
    str, typer.Option("--parts", help="What to take along: full, text, encoder or vision.")
]
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


@contextmanager
def _refusals() -> Iterator[None]:
    """Expected errors become one line on standard error and exit status 1."""
    try:
        yield
    except HeadraceError as error:
        message = error.message
    except OSError as error:
        message = f"{error.filename or 'files'}: {error.strerror or error}"
    else:
        return
    err = Console(stderr=True, soft_wrap=True, highlight=False)
    err.print(f"[red]error:[/red] {escape(message)}")
    raise typer.Exit(1)


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
        int | None,
        typer.Option(
            "--keep",
            help="Decoder rows kept in a prefill, at least the window. Default: the model's, window"
            " + 12.",
            show_default=False,
        ),
    ] = None,
    as_json: AsJson = False,
    png: Annotated[
        Path | None, typer.Option("--png", help="Also draw stacked bars into this file.")
    ] = None,
) -> None:
    """Bytes of a model's state and weights, layer by layer, and what fits into memory."""
    with _refusals():
        from headrace.model import layout_command

        layout_command.layout(config, memory, tp, backtrack, keep, as_json, png)


@app.command()
def inspect(
    folder: Folder,
    values: Annotated[
        bool, typer.Option("--values", help="Decode every weight; refuse values not finite.")
    ] = False,
    verify: Annotated[
        bool, typer.Option("--verify", help="Read all bytes, compare with the index's digest.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Check a checkpoint's index, headers, names, shapes and formats, and say what it holds."""
    with _refusals():
        from headrace.model import commands

        commands.inspect(folder, values, verify, as_json)


@app.command()
def convert(
    source: Folder,
    target: NewFolder,
    parts: Parts = "full",
    max_shard: ShardSize = "10GiB",
    prefix: Prefix = False,
    block: Block = None,
    experts: Experts = "fp4",
    bf16: Plain = False,
    as_json: AsJson = False,
) -> None:
    """Rewrite a checkpoint: nested config, other shards, parts or formats.

    The target has the release's formats unless told otherwise; weights that are in theirs already
    are copied byte for byte.
    """
    with _refusals():
        from headrace.model import commands

        form = commands.Form(parts, max_shard, prefix, block, experts, bf16)
        commands.convert(source, target, form, as_json)


@app.command()
def random(
    config: ModelName,
    target: NewFolder,
    seed: Annotated[int, typer.Option("--seed", help="Same seed, same bytes.")] = 0,
    parts: Parts = "full",
    max_shard: ShardSize = "10GiB",
    prefix: Prefix = False,
    block: Block = None,
    experts: Experts = "fp4",
    bf16: Plain = False,
    tokenizer: Annotated[
        Path | None,
        typer.Option("--tokenizer", help="tokenizer.json to put beside the weights."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Write a checkpoint of random weights with the real names, formats and index.

    Without --tokenizer the package's tokenizer of that vocabulary goes along, if there is one.
    """
    with _refusals():
        from headrace.model import commands

        form = commands.Form(parts, max_shard, prefix, block, experts, bf16)
        commands.random(config, target, seed, form, tokenizer, as_json)
