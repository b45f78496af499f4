"""Ask the probes: of the forward without caches, of the engine, or of a server; print a table.

    python bench/probes/run.py --cases 20 --out probes.json            # no caches
    python bench/probes/run.py --cases 100 --engine                    # the `all` engine
    python bench/probes/run.py --url http://127.0.0.1:8000/v1 --key KEY --cases 4   # any server

Without caches one forward over prompt and answer decides: greedy decoding gives exactly the wanted
answer iff every token of it is the most likely one after those before. `--engine` and `--url`
generate; `--forward` beside them says in how many cases the forward judges as they answered.
`--out` is written after every cell. The last lines are totals, by probe and in all. `--show-wrong`
prints the end of the question, the wanted answer and the one got; of the forward that is the
likeliest token after each begin of the wanted answer, so it may read oddly.
"""

from __future__ import annotations

import argparse
import json
import time
import urllib.error
import urllib.request
from base64 import b64encode
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any, Protocol

import torch
from forward import Forward
from grid import Case, all_cases, long_cases
from PIL import Image

from headrace.model.training.chat import IMAGE

ANSWER_TOKENS = 160
DEADLINE_S = 300
TAIL_CHARS = 200  # of a question that was answered wrongly


@dataclass(frozen=True)
class Got:
    """An answer, and whether it is the wanted one word for word."""

    right: bool
    text: str


class Asked(Protocol):
    """Something that answers."""

    def got(self, cases: Sequence[Case]) -> list[Got]: ...


class ForwardRun:
    """The forward without caches."""

    def __init__(self, forward: Forward) -> None:
        self._forward = forward

    def got(self, cases: Sequence[Case]) -> list[Got]:
        found = []
        for case in cases:
            said, wanted = self._forward.said(case)
            text = self._forward.encoder.tokenizer.decode(said, skip_special_tokens=False)
            found.append(Got(said == wanted, str(text)))
        return found


class EngineRun:
    """The `all` engine: caches, blocks, quantised KV; nothing stored."""

    def __init__(self, model: str, numerics: str, keep_tokens: int) -> None:
        from pools import Pools

        self._pools = Pools(model, numerics)
        self._keep_tokens = self._pools.geometry.keep_for(keep_tokens)

    def got(self, cases: Sequence[Case]) -> list[Got]:
        prompts = [self._pools.prompts(case)[-1] for case in cases]
        answers = self._pools.cold(prompts, self._keep_tokens)
        return [
            Got(self._pools.right(p, a), self._pools.text(a))
            for p, a in zip(prompts, answers, strict=True)
        ]


class ServerRun:
    """Any OpenAI-compatible server."""

    def __init__(self, url: str, key: str, model: str, at_once: int) -> None:
        self._url, self._key, self._model = url.rstrip("/"), key, model
        self._threads = ThreadPoolExecutor(at_once)

    def got(self, cases: Sequence[Case]) -> list[Got]:
        answers = self._threads.map(self.answer, cases)
        return [Got(a == case.task.answer, a) for a, case in zip(answers, cases, strict=True)]

    def answer(self, case: Case) -> str:
        messages: list[dict[str, object]] = []
        if case.task.system:
            messages.append({"role": "system", "content": case.task.system})
        for turn in case.task.turns:
            messages.append({"role": "user", "content": content(str(turn.user), case)})
            messages.append({"role": "assistant", "content": turn.answer})
        body = {
            "model": self._model,
            "messages": messages[:-1],
            "temperature": 0,
            "max_tokens": ANSWER_TOKENS,
        }
        request = urllib.request.Request(
            f"{self._url}/chat/completions",
            json.dumps(body).encode(),
            {"Content-Type": "application/json", "Authorization": f"Bearer {self._key}"},
        )
        try:
            with urllib.request.urlopen(request, timeout=DEADLINE_S) as response:
                return str(json.load(response)["choices"][0]["message"]["content"])
        except urllib.error.HTTPError as error:
            said = error.read(400).decode(errors="replace")
            raise SystemExit(f"{case.probe} {case.cell}: {error.code} {said}") from None
        except urllib.error.URLError as error:
            raise SystemExit(f"{self._url} does not answer: {error.reason}") from None


def content(text: str, case: Case) -> object:
    """A user's words as the API takes them, the case's picture where the text has its mark."""
    if case.picture is None or not text.startswith(IMAGE):
        return text
    file = BytesIO()
    Image.fromarray(case.picture).save(file, "PNG")
    url = "data:image/png;base64," + b64encode(file.getvalue()).decode()
    words = text.removeprefix(f"{IMAGE}\n\n")
    return [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": words}]


def totals(rows: Iterable[Mapping[str, Any]]) -> list[str]:
    """Lines with the right of the asked: of each probe, P2 before P10, and of all."""
    asked: Counter[str] = Counter()
    right: Counter[str] = Counter()
    for row in rows:
        asked[row["probe"]] += row["n"]
        right[row["probe"]] += row["right"]
    order = sorted(asked, key=lambda probe: (int(probe.removeprefix("P")), probe))
    lines = [", ".join(f"{probe} {right[probe]}/{asked[probe]}" for probe in order)]
    return [*lines, f"right {right.total()} of {asked.total()}"]


def wrong_answers(cases: Sequence[Case], got: Sequence[Got]) -> list[str]:
    """Lines that show each wrong answer: the question's end, the wanted answer, the one got."""
    lines = []
    for case, one in zip(cases, got, strict=True):
        if not one.right:
            tail = str(case.task.turns[-1].user)[-TAIL_CHARS:]
            lines += [
                f"  {case.probe} {case.cell}, case {case.number}: ... {tail!r}",
                f"    wanted {case.task.answer!r}",
                f"    got    {one.text!r}",
            ]
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="demo")
    parser.add_argument("--cases", type=int, default=20, help="of each cell")
    parser.add_argument("--probes", nargs="*", default=[], help="P1 P4: only these")
    parser.add_argument("--long", action="store_true", help="P1 and P4 of 2,000 to 8,000 tokens")
    way = parser.add_mutually_exclusive_group()
    way.add_argument("--engine", action="store_true", help="the `all` engine in this process")
    way.add_argument("--url", help="a server, e.g. http://127.0.0.1:8000/v1")
    parser.add_argument("--numerics", default="fast", help="of --engine: fast or invariant")
    parser.add_argument("--keep", type=int, default=0, help="of --engine; default: window + 12")
    parser.add_argument("--key", default="", help="of --url")
    parser.add_argument("--at-once", type=int, default=2, help="requests of --url under way")
    parser.add_argument("--forward", action="store_true", help="judge by the forward as well")
    parser.add_argument("--without-engram", action="store_true", help="forward: tables of zeros")
    parser.add_argument("--show-wrong", action="store_true", help="questions, wanted and got")
    parser.add_argument("--out", type=Path)
    a = parser.parse_args()
    torch.set_num_threads(1)
    cells: dict[tuple[str, str], list[Case]] = {}
    for case in (long_cases if a.long else all_cases)(a.cases, a.probes):
        cells.setdefault((case.probe, case.cell), []).append(case)
    forward = (
        Forward(a.model, without_engram=a.without_engram)
        if a.forward or not (a.engine or a.url)
        else None
    )
    asked: Asked
    if a.engine:
        asked = EngineRun(a.model, a.numerics, a.keep)
    elif a.url:
        asked = ServerRun(a.url, a.key, a.model, a.at_once)
    else:
        assert forward is not None
        asked = ForwardRun(forward)
    began, rows = time.monotonic(), []
    for number, ((probe, cell), own) in enumerate(cells.items(), 1):
        got = asked.got(own)
        right = [one.right for one in got]
        row: dict[str, Any] = {"probe": probe, "cell": cell, "n": len(own), "right": sum(right)}
        if forward is not None and (a.engine or a.url):
            judged = [forward.judge(case) for case in own]
            row["as_forward"] = sum(x == y for x, y in zip(right, judged, strict=True))
        rows.append(row)
        if a.out:
            a.out.write_text(json.dumps(rows, indent=1) + "\n", "utf-8")
        same = f"  as forward {row['as_forward']}" if "as_forward" in row else ""
        print(
            f"{probe:4} {cell:>8}  right {row['right']}/{row['n']}{same}"
            f"    ({number} of {len(cells)} cells, {time.monotonic() - began:.0f} s)",
            flush=True,
        )
        if a.show_wrong:
            print(*wrong_answers(own, got), sep="\n", end="\n" if sum(right) < len(own) else "")
    print(*totals(rows), sep="\n")


if __name__ == "__main__":
    main()
