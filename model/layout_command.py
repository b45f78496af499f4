"""What `headrace layout` does, and what it shares with `commands`; nothing here needs torch.

It prints a table or JSON on standard output and raises `ConfigError` or `CheckpointError` for what
it refuses, before it writes anything.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.measure import Measurement
from rich.table import Table

from headrace.model.checkpoint.json_files import CONFIG_NAME, read_json
from headrace.model.checkpoint.release import ReleaseConfig, read_config, released_quantisation
from headrace.model.config import ModelConfig, package_models
from headrace.model.errors import ConfigError
from headrace.model.report import layout_report
from headrace.model.report_picture import draw_png
from headrace.model.report_views import as_json, tables

_SIZE = re.compile(r"(\d{1,15}(?:\.\d{1,15})?)\s*(B|kB|MB|GB|TB|KiB|MiB|GiB|TiB)")
_POWERS = {"B": 0, "k": 1, "K": 1, "M": 2, "G": 3, "T": 4}


def parse_bytes(text: str, option: str) -> int:
    """`141GB`, `80GiB`, `5000B`: kB is 1,000 and KiB is 1,024. A number without its unit is
    refused: 141 bytes are not what anybody means. Raises ConfigError."""
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise ConfigError(
            f"{option}: found {text!r:.60}, wanted a size with its unit, such as 141GB or 80GiB"
        )
    number, unit = match[1], match[2]
    base = 1024 if "i" in unit else 1000
    return int(float(number) * base ** _POWERS[unit[:1]])


def layout(
    name: str, memory: str, tp: int, backtrack: int, keep: int | None, json_: bool, png: Path | None
) -> None:
    """Bytes of a model's state and weights, and what fits."""
    release = release_of(name)
    report = layout_report(
        release.model,
        parse_bytes(memory, "--memory") if memory else None,
        tp,
        backtrack,
        keep,
        quantisation=release.quantisation,
    )
    if png is not None:
        _check_picture(png)
        draw_png(report, png)
    if json_:
        print_json(as_json(report))
    else:
        for table in tables(report, _has_room):
            show_table(table)


def release_of(name: str) -> ReleaseConfig:
    """A package model (quantised as released), a configuration file or a checkpoint's."""
    if name in package_models():
        config = ModelConfig.load(name)
        return ReleaseConfig(config, released_quantisation(config))
    path = Path(name)
    if not name or not (name.endswith(".json") or "/" in name or is_there(path)):
        known = ", ".join(package_models())
        raise ConfigError(
            f"CONFIG: found {name!r:.80}, wanted one of {known}, a config.json or a checkpoint"
        )
    return read_config(read_json(path / CONFIG_NAME if path.is_dir() else path))


def is_there(path: Path) -> bool:
    try:
        return path.exists()
    except (OSError, ValueError):  # a name that no file can have
        return False


def _check_picture(path: Path) -> None:
    if path.suffix != ".png":
        raise ConfigError(f"--png: found {str(path)[-200:]}, wanted a file name that ends in .png")
    if not is_there(path.absolute().parent) or path.is_dir():
        raise ConfigError(f"--png: {str(path)[-200:]} cannot be written: wanted a file in a folder")


def print_json(value: dict[str, Any]) -> None:
    print(json.dumps(value, indent=2))


def _has_room(table: Table) -> bool:
    """Whether a table fits into the window with every figure whole; programs have room for any."""
    console = Console()
    return not console.is_terminal or _widths(console, table).minimum <= console.width


def _widths(console: Console, table: Table) -> Measurement:
    return console.measure(table, options=console.options.update(width=10_000))


def show_table(table: Table) -> None:
    """A table with every figure whole. In a window its notes fold, and what is wider all the same
    wraps there; programs get it as it is."""
    console = Console(highlight=False)
    if console.is_terminal and _has_room(table):
        console.print(table)
        return
    wide = _widths(console, table).maximum
    Console(highlight=False, width=max(wide, 40)).print(table, soft_wrap=True)
