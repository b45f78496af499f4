"""Help of commands from their docstrings, as paragraphs that fill the window."""

from __future__ import annotations

import inspect

import typer


def paragraphs(docstring: str) -> str:
    """A docstring without its line breaks but those between paragraphs."""
    parts = inspect.cleandoc(docstring).split("\n\n")
    return "\n\n".join(" ".join(part.split()) for part in parts)


def unwrap(app: typer.Typer) -> None:
    """Give the commands of `app` and of its groups such help; call it when all are there."""
    for command in app.registered_commands:
        if command.help is None and command.callback is not None and command.callback.__doc__:
            command.help = paragraphs(command.callback.__doc__)
    for group in app.registered_groups:
        if group.typer_instance is not None:
            unwrap(group.typer_instance)
