"""The examples of the README, as they stand there but for address, key and model."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.ray
Live = Any  # the cluster of conftest.py
Questions = Any  # of crowd.py

HELLO = {"type": "text", "text": "Hello!"}
ASKED = {"type": "text", "text": "What is in the picture?"}


def examples(root: Path, language: str, here: dict[str, str]) -> str:
    """All code of one language in the README's section on the start, as for this cluster."""
    text = (root / "README.md").read_text("utf-8").partition("\n## One request")[0]
    code = "\n".join(re.findall(rf"^```{language}\n(.*?)^```", text, re.DOTALL | re.MULTILINE))
    for there, ours in here.items():
        assert there in code
        code = code.replace(there, ours)
    return code


def printed(live: Live, root: Path, command: list[str], code: str) -> str:
    environment = live.environment | {"no_proxy": "127.0.0.1"}
    done = subprocess.run(
        command, input=code.encode(), cwd=root, env=environment, capture_output=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.decode("utf-8")


def test_the_examples_run(live: Live, questions: Questions, image_part: Any, root: Path) -> None:
    shapes = image_part((root / "docs/img/shapes.png").read_bytes())
    greeting, about = questions.chat([HELLO], 32), questions.chat([shapes, ASKED], 32)
    known = len(live.records())
    here = {"http://127.0.0.1:8000": live.url, '"demo"': f'"{live.state.model}"'}

    python = [sys.executable, "-I", "-X", "utf8", "-"]
    key = {"the key that make serve printed": live.key()}
    said = printed(live, root, python, examples(root, "python", here | key))
    live.until(lambda: len(live.records()) == known + 2, 10.0, "no records")
    assert said == greeting.text + about.text + "\n"
    assert [record["pictures_made"] for record in live.records()[known:]] == [0, 1]

    key_file = live.run.api_key_file(live.tenants[0])
    assert key_file.is_relative_to(live.environment["HEADRACE_HOME"])
    key = {"/local/api_key": f"/{key_file.relative_to(live.environment['HEADRACE_HOME'])}"}
    told = json.loads(printed(live, root, ["sh"], examples(root, "sh", here | key)))
    assert told["choices"][0]["message"]["content"] == about.text
    assert told["usage"]["completion_tokens"] == about.n_tokens
    assert live.next_record(known + 2)["pictures_made"] == 0
