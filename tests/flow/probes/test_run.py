"""What bench/probes/run.py prints when a server answers wrongly."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from headrace_tests import module

answering = module("tests/beside/answering.py")
SCRIPT = Path(__file__).parents[3] / "bench" / "probes" / "run.py"


def test_totals_and_wrong_answers_of_a_server(probes: Any) -> None:
    cases = probes.grid.all_cases(2, ("P10", "P9", "P3"))
    wrong = next(case for case in cases if case.probe == "P10")
    answers = {str(case.task.turns[-1].user): case.task.answer for case in cases}
    answers[str(wrong.task.turns[-1].user)] = "not this"
    assert len(answers) == len(cases)  # no question stands twice

    class Handler(answering.Answers):
        def do_POST(self) -> None:
            said = answers[json.loads(self.asked())["messages"][-1]["content"]]
            self.answer(json.dumps({"choices": [{"message": {"content": said}}]}))

    with answering.serving(Handler) as url:
        done = subprocess.run(
            [sys.executable, str(SCRIPT), "--url", url]
            + ["--cases", "2", "--show-wrong", "--probes", "P10", "P9", "P3"],
            capture_output=True,
            text=True,
        )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    n = {probe: sum(case.probe == probe for case in cases) for probe in ("P3", "P9", "P10")}
    assert lines[-2:] == [
        f"P3 {n['P3']}/{n['P3']}, P9 {n['P9']}/{n['P9']}, P10 {n['P10'] - 1}/{n['P10']}",
        f"right {len(cases) - 1} of {len(cases)}",
    ]
    at = next(i for i, line in enumerate(lines) if line.startswith("  P10 "))
    tail = str(wrong.task.turns[-1].user)[-200:]
    assert lines[at : at + 3] == [
        f"  P10 {wrong.cell}, case {wrong.number}: ... {tail!r}",
        f"    wanted {wrong.task.answer!r}",
        "    got    'not this'",
    ]
    assert sum(line.startswith("    got") for line in lines) == 1
