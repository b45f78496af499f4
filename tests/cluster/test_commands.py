"""The model room's commands, reached through `headrace`."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

HEADRACE = Path(sys.executable).parent / "headrace"


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([HEADRACE, *arguments], capture_output=True, text=True, check=False)


def test_layout_of_the_published_model() -> None:
    done = run("layout", "flash", "--json")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["bytes_per_token"] == 890
    assert report["block_bytes"] == 113_920
    assert report["window_record_bytes"] == 1_341_120


def test_help_and_refusals_come_from_the_inner_command() -> None:
    shown = run("model", "inspect", "--help")
    assert shown.returncode == 0
    assert "headrace model inspect" in shown.stdout
    refused = run("layout", "no-such-model")
    assert refused.returncode != 0
    assert "no-such-model" in refused.stderr + refused.stdout
