"""A plain chat in the terminal, over the cluster's own HTTP API."""

from __future__ import annotations

from rich.console import Console

from headrace.cluster.config import load_config
from headrace.cluster.http import ApiError, HttpApi
from headrace.cluster.rundir import RunDir
from headrace.core.errors import ConfigError


def api_of(run: RunDir) -> HttpApi:
    """The API of a running cluster, with the key of its first tenant. Raises `ConfigError`."""
    state = run.read_state()
    if state is None or not state.url:
        raise ConfigError(f"cluster {run.cluster} is not ready; see `headrace status`")
    keys = load_config(run.config_file).api_keys(run)
    return HttpApi(state.url, keys[0].key)


def converse(run: RunDir, out: Console, *, system: str, max_tokens: int) -> None:
    """Read lines, stream answers, keep the history; ends at an empty line or end of input.

    An error of one turn is shown and the turn forgotten; the conversation goes on."""
    api = api_of(run)
    state = run.read_state()
    assert state is not None
    messages = [{"role": "system", "content": system}] if system else []
    while True:
        try:
            line = out.input("[bold]you>[/] ").strip()
        except (EOFError, KeyboardInterrupt):
            out.print()
            return
        if not line:
            return
        messages.append({"role": "user", "content": line})
        try:
            answer, usage = _turn(api, state.model, messages, max_tokens, out)
        except ApiError as error:
            messages.pop()
            out.print(f"\n[red]{error.message}[/]")
            continue
        except KeyboardInterrupt:
            messages.pop()
            out.print("\n[dim]broken off[/]")
            continue
        messages.append({"role": "assistant", "content": answer})
        out.print(f"\n[dim]{usage}[/]")


def _turn(
    api: HttpApi, model: str, messages: list[dict[str, str]], max_tokens: int, out: Console
) -> tuple[str, str]:
    parts, usage = [], ""
    for chunk in api.chat(model, messages, max_tokens):
        for choice in chunk.get("choices", ()):
            text = choice.get("delta", {}).get("content") or ""
            parts.append(text)
            out.print(text, end="", markup=False, highlight=False)
        if counted := chunk.get("usage"):
            cached = (counted.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
            usage = (
                f"{counted['prompt_tokens']} tokens in ({cached} from the store),"
                f" {counted['completion_tokens']} out"
            )
    return "".join(parts), usage
