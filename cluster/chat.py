"""A plain chat in the terminal, over the cluster's own HTTP API.

`/image PATH` attaches a picture to the next message, `/help` says so; no other line may begin with
a `/`."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.console import Console

from headrace.cluster.config import ClusterConfig, load_config
from headrace.cluster.http import ApiError, HttpApi
from headrace.cluster.rundir import RunDir
from headrace.core.errors import ConfigError

ATTACH = "/image"
HELP = "/help"
USAGE = "`/image PATH` attaches a picture to the next message; an empty line or Ctrl-D ends"
KINDS = {".png": "png", ".jpg": "jpeg", ".jpeg": "jpeg", ".webp": "webp", ".gif": "gif"}


def api_of(run: RunDir, config: ClusterConfig | None = None) -> HttpApi:
    """The API of a running cluster, with the key of its first tenant; `config` is the run's, where
    it has been read. Raises `ConfigError`."""
    state = run.read_state()
    if state is None or not state.url:
        raise ConfigError(f"cluster {run.cluster} is not ready; see `headrace status`")
    keys = (config or load_config(run.config_file)).api_keys(run)
    return HttpApi(state.url, keys[0].key)


def image_part(path: Path) -> dict[str, Any]:
    """A picture file as a part of a message, its bytes in a data URL. Raises `ConfigError` for a
    file that cannot be read or ends in no known picture's suffix; the cluster judges the rest."""
    kind = KINDS.get(path.suffix.lower())
    if kind is None:
        raise ConfigError(f"the name of a picture ends in {', '.join(KINDS)}, got {path}")
    try:
        data = path.expanduser().read_bytes()
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from None
    url = f"data:image/{kind};base64,{base64.b64encode(data).decode()}"
    return {"type": "image_url", "image_url": {"url": url}}


def attached_path(line: str) -> Path | None:
    """The file that a line attaches, None for a line that is a message.

    Raises `ConfigError` with the usage for every other line that begins with a `/`, and with
    nothing but the usage for `/help`."""
    if not line.startswith("/"):
        return None
    command, *rest = line.split(maxsplit=1)
    if command == HELP:
        raise ConfigError(USAGE)
    if command != ATTACH:
        raise ConfigError(f"there is no command {command[:40]!r}; {USAGE}")
    if not rest:
        raise ConfigError(f"{ATTACH} needs the path of a picture; {USAGE}")
    return Path(rest[0])


def converse(
    run: RunDir, out: Console, *, system: str, max_tokens: int, temperature: float = 0.0
) -> None:
    """Read lines, stream answers, keep the history; ends at an empty line or end of input.

    A line `/image PATH` attaches a file to the message that follows; several may be attached. An
    error of one turn is shown and the turn forgotten; the conversation goes on. Raises `ApiError`
    before anything is read when nobody answers."""
    api = api_of(run)
    api.check_reached()
    state = run.read_state()
    assert state is not None
    messages: list[dict[str, Any]] = []
    if system:
        messages.append({"role": "system", "content": system})
    attached: list[dict[str, Any]] = []
    out.print(f"model {state.model} of cluster {run.cluster} at {state.url}", markup=False)
    out.print(USAGE, markup=False)
    while True:
        try:
            line = out.input("[bold]you>[/] ").strip()
        except (EOFError, KeyboardInterrupt):
            out.print()
            return
        if not line:
            return
        try:
            if (path := attached_path(line)) is not None:
                attached.append(image_part(path))
                said = f"{path.name} goes with the next message"
                out.print(said, style="dim", markup=False, emoji=False)
                continue
        except ConfigError as error:
            out.print(error.message, style="red", markup=False, emoji=False)
            continue
        content = [*attached, {"type": "text", "text": line}] if attached else line
        attached = []
        messages.append({"role": "user", "content": content})
        try:
            answer, usage = _turn(api.chat(state.model, messages, max_tokens, temperature), out)
        except ApiError as error:
            messages.pop()
            out.print(f"\n{error.message}", style="red", markup=False, emoji=False)
            continue
        except KeyboardInterrupt:
            messages.pop()
            out.print("\n[dim]broken off[/]")
            continue
        messages.append({"role": "assistant", "content": answer})
        out.print(f"\n[dim]{usage}[/]")


def _turn(chunks: Iterator[dict[str, Any]], out: Console) -> tuple[str, str]:
    parts, usage = [], ""
    for chunk in chunks:
        for choice in chunk.get("choices", ()):
            text = choice.get("delta", {}).get("content") or ""
            parts.append(text)
            out.print(text, end="", markup=False, highlight=False, emoji=False)
        if counted := chunk.get("usage"):
            cached = (counted.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
            usage = (
                f"{counted['prompt_tokens']} tokens in ({cached} cached),"
                f" {counted['completion_tokens']} out"
            )
    return "".join(parts), usage
