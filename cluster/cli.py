"""The `headrace` command: up, down, status, chat, store, role, model, layout, version.

Every message that refuses something says what to do instead. Nothing here imports ray or torch:
the leader and the roles do, in their own processes. What a command needs is imported when it runs,
so that `--help` is there at once.
"""

from __future__ import annotations

import json
import shlex
import shutil
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, NoReturn, TypeVar

import typer
from rich.console import Console
from rich.markup import escape
from rich.text import Text

from headrace.cluster import model_cli
from headrace.cluster.help_text import unwrap
from headrace.core.errors import ConfigError, HeadraceError

if TYPE_CHECKING:
    from headrace.cluster.launch import Launch
    from headrace.cluster.rundir import RunDir

T = TypeVar("T")
app = typer.Typer(
    name="headrace",
    help="Serve DeepSeek-V4.1-family models from separate vision, prefill and decode pools.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_show_locals=False,  # locals may hold keys
)
out = Console(highlight=False, soft_wrap=True, emoji=False)
err = Console(stderr=True, highlight=False, soft_wrap=True, emoji=False)

ConfigPath = Annotated[
    Path, typer.Argument(help="Cluster file, e.g. configs/cluster/local.yaml.", show_default=False)
]
ClusterName = Annotated[
    str, typer.Option("--name", help="Name of the cluster. Default: the only one that runs.")
]


class Doing:
    """What a start is at, with the seconds since it began; a terminal draws it again and again."""

    def __init__(self, now_s: Callable[[], float] = time.monotonic) -> None:
        self.text = "starting"
        self._now_s = now_s
        self._began_s = now_s()

    @property
    def seconds(self) -> float:
        return self._now_s() - self._began_s

    def __rich__(self) -> Text:
        return Text(f"{self.seconds:3.0f} s  {self.text}")


@app.command()
def up(
    config: ConfigPath,
    foreground: Annotated[
        bool, typer.Option("--foreground", help="Stay, and end the cluster with Ctrl-C.")
    ] = False,
    name: Annotated[
        str, typer.Option("--name", help="Name of the cluster. Default: `cluster` of the file.")
    ] = "",
    port: Annotated[
        int | None,
        typer.Option(
            help="Port of the HTTP API for this run, 0 for any free one. Default: router.port of"
            " the file.",
            min=0,
            max=65535,
            show_default=False,
        ),
    ] = None,
    insecure: Annotated[
        bool, typer.Option("--insecure", help="Accept a RAY_AUTH_MODE that is not `token`.")
    ] = False,
) -> None:
    """Start a cluster and return when it is ready.

    A leader in the background holds the cluster; `headrace down` ends it. Ctrl-C, SIGTERM or
    SIGHUP before it is ready ends what was started.

    A second cluster needs a name and a port of its own: --name OTHER --port N.

    State, keys and logs lie in ~/.headrace/NAME, or under $HEADRACE_HOME."""
    from headrace.cluster.launch import INTERRUPTS, Launch

    launch = _or_exit(
        lambda: Launch(config, name, port=port, foreground=foreground, insecure=insecure)
    )
    # before the leader exists: whoever ends this command wants no cluster that goes on starting
    for number in INTERRUPTS:
        if signal.getsignal(number) is not signal.SIG_IGN:  # as nohup has it
            signal.signal(number, _raise_interrupt)
    try:
        _start(launch)
        _print_welcome(launch)
        if foreground:
            _or_exit(launch.wait)
            err.print("the cluster was ended by `headrace down`")
    except KeyboardInterrupt:
        err.print("\nstopping (a second Ctrl-C does not make it faster)")
        for number in INTERRUPTS:
            signal.signal(number, signal.SIG_IGN)
        _or_exit(lambda: launch.abandon(_say))
        err.print("stopped; no process is left")
        raise typer.Exit(0 if foreground else 130) from None


@app.command()
def down(
    name: ClusterName = "",
) -> None:
    """End a cluster and every process of it; other clusters are not touched."""
    from headrace.cluster.launch import end_cluster

    run = _or_exit(lambda: _pick(name, for_what="end"))
    ended = _or_exit(lambda: end_cluster(run, _say))
    if ended:
        out.print(f"cluster {run.cluster} ended: {ended} processes gone, none left")
    else:
        out.print(f"cluster {run.cluster} does not run")


@app.command()
def status(
    name: ClusterName = "",
    as_json: Annotated[bool, typer.Option("--json", help="Machine-readable.")] = False,
) -> None:
    """Show the roles of a cluster: process, health and load.

    Clusters are looked for under $HEADRACE_HOME, or ~/.headrace without it."""
    from headrace.cluster.status import collect, store_table, table

    if not out.is_terminal:
        out.width = 160  # piped: nobody's window to fit into
    run = _or_exit(lambda: _pick(name, for_what="show"))
    view = _or_exit(lambda: collect(run))
    if as_json:
        out.print_json(json.dumps(view))
    else:
        out.print(table(view, out.width), soft_wrap=False)
        if view["store"] is not None:
            out.print(store_table(view["store"]), soft_wrap=False)
        for note in view["notes"]:
            out.print(f"[yellow]{escape(note)}[/]")
    if not view["ready"]:
        raise typer.Exit(3)


@app.command()
def chat(
    name: ClusterName = "",
    max_tokens: Annotated[int, typer.Option(help="Longest answer, in tokens.", min=1)] = 256,
    system: Annotated[str, typer.Option(help="A system message.")] = "",
    temperature: Annotated[
        float, typer.Option(help="0: always the likeliest word.", min=0.0, max=2.0)
    ] = 0.0,
) -> None:
    """Talk to a running cluster. `/image PATH` attaches a picture to the next message; an empty
    line or Ctrl-D ends it."""
    from headrace.cluster.chat import converse

    run = _or_exit(lambda: _pick(name, for_what="talk to"))
    _or_exit(
        lambda: converse(run, out, system=system, max_tokens=max_tokens, temperature=temperature)
    )


@app.command()
def role(
    kind: Annotated[
        str,  # no enum: its choices would fill the help and break inside a word
        typer.Argument(
            metavar="KIND", help="store, vision, prefill, decode or router.", show_default=False
        ),
    ],
    config: Annotated[Path, typer.Option("--config", help="Cluster file.", show_default=False)],
    name: Annotated[
        str,
        typer.Option(
            "--name",
            help="Name of this replica, e.g. decode-0 (not of the cluster).",
            show_default=False,
        ),
    ],
    cluster: Annotated[
        str,
        typer.Option(
            help="Name of the cluster it belongs to, as given to `up --name`. Default: `cluster`"
            " of the file."
        ),
    ] = "",
) -> None:
    """Run one role as a plain process, without Ray, until SIGTERM.

    The roles of one cluster find each other through the Redis of its configuration."""
    from headrace.cluster.config import load_config
    from headrace.cluster.roles import check_role, run_plain
    from headrace.cluster.rundir import RunDir, check_name, headrace_home

    def serve() -> None:
        settings = load_config(config, cluster=cluster)
        run = RunDir(headrace_home(), settings.cluster)
        run_plain(settings, run, check_role(kind), check_name(name), _say)

    _or_exit(serve)


app.add_typer(model_cli.app)
app.command()(model_cli.layout)


# The commands of `headrace store` parse their own arguments: importing them costs a start-up.
@app.command(
    context_settings={
        "allow_extra_args": True,
        "ignore_unknown_options": True,
        "help_option_names": [],
    }
)
def store(context: typer.Context) -> None:
    """Look into a KV store, repair it, carry prefixes: headrace store --help."""
    from headrace.cluster.store_cli import app as store_app

    store_app(context.args, prog_name="headrace store")


@app.command()
def version() -> None:
    """Print the build: version, and commit if this is an installed wheel."""
    from headrace.cluster.roles import build_id

    out.print(f"headrace {build_id()} (Python {sys.version.split()[0]})")


unwrap(app)


def main() -> None:
    """Entry point of the console script."""
    app()


def _start(launch: Launch) -> None:
    """Start the cluster, telling what is being done and for how long."""
    doing = Doing()
    with err.status(doing):

        def show(text: str) -> None:
            doing.text = text
            if not err.is_terminal:
                err.print(doing)

        _or_exit(lambda: launch.start(show))
    err.print(f"ready after {doing.seconds:.0f} s")


def _print_welcome(launch: Launch) -> None:
    from headrace.cluster.launch import running_clusters

    state, key = launch.state(), launch.first_key()
    body = json.dumps(
        {
            "model": state.model,
            "messages": [{"role": "user", "content": "Hello!"}],
            "max_tokens": 64,
            "stream": True,
        }
    )
    out.print(f"[bold green]cluster {state.cluster} is ready[/] at [bold]{state.url}[/]\n")
    out.print("  curl -N " + state.url + "/v1/chat/completions \\", markup=False)
    out.print(f"    -H 'Authorization: Bearer {key}' \\", markup=False)
    out.print("    -H 'Content-Type: application/json' \\", markup=False)
    out.print(f"    -d '{body}'\n", markup=False)
    option = "" if len(running_clusters(launch.run.home)) == 1 else f" --name {state.cluster}"
    for command in ("status", "chat", "down"):
        out.print(f"  {_invoked()} {command}{option}", markup=False)
    out.print(f"\nlogs in {launch.run.logs}", markup=False)


def _invoked() -> str:
    """This command as it was called, for a shell to take again."""
    called = sys.argv[0]
    return "headrace" if called == shutil.which("headrace") else shlex.quote(called)


def _pick(name: str, *, for_what: str) -> RunDir:
    from headrace.cluster.launch import running_clusters
    from headrace.cluster.rundir import RunDir, headrace_home

    home = headrace_home()
    if name:
        run = RunDir(home, name)
        if run.read_state() is None:
            raise ConfigError(f"there is no cluster {name} under {home}")
        return run
    running = running_clusters(home)
    if not running:
        advice = "`headrace up configs/cluster/local.yaml` starts one"
        if for_what == "end":
            advice = "there is nothing to end"
        raise ConfigError(
            f"no cluster runs under {home}{_failed(home)}; {advice} (HEADRACE_HOME names another"
            " folder to look in)"
        )
    if len(running) > 1:
        names = ", ".join(run.cluster for run in running)
        raise ConfigError(f"several clusters run ({names}): say --name which to {for_what}")
    return running[0]


def _failed(home: Path) -> str:
    """Words on clusters whose last run failed, for somebody who looks for a running one."""
    from headrace.cluster.rundir import Phase, known_clusters

    states = {run.cluster: run.read_state() for run in known_clusters(home)}
    found = [name for name, state in states.items() if state and state.phase is Phase.FAILED]
    return f" ({', '.join(found)} failed: `headrace status --name` tells why)" if found else ""


def _say(text: str) -> None:
    err.print(escape(text))


def _raise_interrupt(number: int, frame: FrameType | None) -> NoReturn:
    raise KeyboardInterrupt


def _or_exit(step: Callable[[], T]) -> T:
    try:
        return step()
    except HeadraceError as error:
        _fail(error.message)


def _fail(message: str) -> NoReturn:
    err.print(f"[bold red]headrace:[/] {escape(message)}")
    raise typer.Exit(1)
