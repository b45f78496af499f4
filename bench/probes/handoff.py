"""The probes through a hand-off in one process, `exact` and `replay`, against a run without caches.

    python bench/probes/handoff.py --cases 20 --out exact.json
    python bench/probes/handoff.py --mode replay --cases 10 --keeps 64 76 --depths 64 128 252 \
        --numerics fast --probes P1 P2 --out replay.json

Of every case: the `all` engine cold with the same keep (`cold`), then in stores of their own
  handed   nothing stored: prefill makes blocks and a window record, decode loads them and answers
  grown    after the prompt's first 60 % were asked: the prefix is found, the rest is prefilled
  again    the whole prompt once more: all of it is found
P6 asks every turn of its talk in one store, P7 and P13 the first ending (or picture) and then the
other. Per cell and pass: right answers, answers equal to the cold run's in every token and every
bit of a logit, least and mean tokens before the first difference, and the largest difference of a
logit up to there. `--out` is written after every cell, and cells that it has are not run again.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from grid import Case, all_cases
from pools import Answer, Pools, Prompt, Session, compare

PASSES = ("handed", "grown", "again")
GROWN = 0.6  # share of a prompt that is asked before the whole


@dataclass(frozen=True)
class Result:
    """One cell in one pass: counts over `n` answers."""

    mode: str
    keep_tokens: int
    depth_tokens: int | None
    numerics: str
    probe: str
    cell: str
    passed: str
    n: int
    right: int
    same_bits: int
    same_tokens: int
    least_equal_tokens: int  # of answers that differ; of all where none does
    mean_equal_tokens: float
    answer_tokens: float
    logit_difference: float
    hit_tokens: float  # mean, at decode
    found_tokens: float  # mean, before anything of this request ran
    decode_encoder_rows: float


class Asked:
    """Answers of one pass beside the cold ones."""

    def __init__(self, pools: Pools) -> None:
        self._pools = pools
        self.rows: dict[str, list[tuple[Prompt, Answer, Answer]]] = defaultdict(list)

    def add(
        self, name: str, prompts: Sequence[Prompt], got: Sequence[Answer], cold: Sequence[Answer]
    ) -> None:
        self.rows[name] += zip(prompts, got, cold, strict=True)

    def result(self, name: str, head: dict[str, object]) -> Result:
        rows = self.rows[name]
        found = [compare(got, cold) for _, got, cold in rows]
        differ = [d.equal_tokens for d in found if not d.same_bits]
        mean = lambda values: sum(values) / len(rows)  # noqa: E731
        return Result(
            **head,  # type: ignore[arg-type]
            passed=name,
            n=len(rows),
            right=sum(self._pools.right(p, got) for p, got, _ in rows),
            same_bits=sum(d.same_bits for d in found),
            same_tokens=sum(got.tokens == cold.tokens for _, got, cold in rows),
            least_equal_tokens=min(differ or [d.equal_tokens for d in found]),
            mean_equal_tokens=mean(d.equal_tokens for d in found),
            answer_tokens=mean(len(cold.tokens) for _, _, cold in rows),
            logit_difference=max(d.logits for d in found),
            hit_tokens=mean(got.hit_tokens for _, got, _ in rows),
            found_tokens=mean(got.found_tokens for _, got, _ in rows),
            decode_encoder_rows=mean(got.encoder_rows for _, got, _ in rows),
        )


class Grid:
    """Cells through a hand-off; cold answers are kept for other depths of the same keep."""

    def __init__(self, pools: Pools, keep_tokens: int, depth_tokens: int | None) -> None:
        self.pools, self.keep_tokens, self.depth_tokens = pools, keep_tokens, depth_tokens

    def session(self, *, key_spans: bool = True) -> Session:
        return Session(self.pools, self.keep_tokens, self.depth_tokens, key_spans=key_spans)

    def ask(
        self,
        cases: Sequence[Case],
        cold: Cold,
        passes: Collection[str] = PASSES,
        again: int | None = None,
    ) -> Asked:
        """The passes of the cases of one cell (P7 and P13: of both), `again` in the store of the
        pass before it and of the first `again` cases alone, where that is given."""
        asked = Asked(self.pools)
        if cases[0].probe == "P6":
            return self._talks(asked, cases, cold, passes, again)
        prompts = [self.pools.prompts(case)[-1] for case in cases]
        answers = cold.of(prompts, self.keep_tokens)
        asked.add("cold", prompts, answers, answers)
        session = self.session()
        if "handed" in passes:
            asked.add("handed", prompts, session.ask(prompts), answers)
        if "grown" in passes:
            session = self._grow(asked, cases, prompts, answers)
        asked.add("again", prompts[:again], session.ask(prompts[:again]), answers[:again])
        return asked

    def _grow(
        self, asked: Asked, cases: Sequence[Case], prompts: list[Prompt], answers: list[Answer]
    ) -> Session:
        session = self.session()
        if cases[0].probe in ("P7", "P13"):
            for branch in "ab":
                mine = [n for n, case in enumerate(cases) if case.cell == branch]
                own = [prompts[n] for n in mine]
                asked.add("grown", own, session.ask(own), [answers[n] for n in mine])
        else:
            session.ask([_begin(prompt) for prompt in prompts])
            asked.add("grown", prompts, session.ask(prompts), answers)
        return session

    def _talks(
        self,
        asked: Asked,
        cases: Sequence[Case],
        cold: Cold,
        passes: Collection[str],
        again: int | None,
    ) -> Asked:
        """`grown`: every turn, one after the other, in one store. Where `handed` is left out, only
        the answers to both questions at the end are compared."""
        talks = [self.pools.prompts(case) for case in cases]
        session = self.session()
        for turn in range(max(map(len, talks))):
            own = [talk for talk in talks if turn < len(talk)]
            prompts = [talk[turn] for talk in own]
            got = session.ask(prompts)
            if "handed" not in passes:
                prompts, got = _of_the_end(own, turn, got)
            answers = cold.of(prompts, self.keep_tokens)
            asked.add("grown", prompts, got, answers)
        last = [talk[-1] for talk in talks]
        answers = cold.of(last, self.keep_tokens)
        asked.add("cold", last, answers, answers)
        if "handed" in passes:
            asked.add("handed", last, self.session().ask(last), answers)
        asked.add("again", last[:again], session.ask(last[:again]), answers[:again])
        return asked


class Cold:
    """Answers of the `all` engine, each made once."""

    def __init__(self, pools: Pools) -> None:
        self._pools = pools
        self._known: dict[tuple[object, ...], Answer] = {}

    def of(self, prompts: Sequence[Prompt], keep_tokens: int) -> list[Answer]:
        new = {(p.key, keep_tokens): p for p in prompts if (p.key, keep_tokens) not in self._known}
        made = self._pools.cold(list(new.values()), keep_tokens)
        self._known |= zip(new, made, strict=True)
        return [self._known[p.key, keep_tokens] for p in prompts]


def _of_the_end(
    talks: Sequence[list[Prompt]], turn: int, got: Sequence[Answer]
) -> tuple[list[Prompt], list[Answer]]:
    """Prompts and answers of those talks whose last or last but one turn this is."""
    found = [(t[turn], a) for t, a in zip(talks, got, strict=True) if turn >= len(t) - 2]
    return [prompt for prompt, _ in found], [answer for _, answer in found]


def _begin(prompt: Prompt) -> Prompt:
    """The first part of a prompt, cut outside its pictures."""
    n = max(1, int(GROWN * len(prompt.ids)))
    for span in prompt.spans:
        n = span.end if span.start < n < span.end else n
    return prompt.cut(n)


def by_cell(cases: Sequence[Case]) -> Iterator[tuple[str, str, list[Case]]]:
    """(probe, cell, cases); P7's and P13's two cells together, since they share a store."""
    cells: dict[tuple[str, str], list[Case]] = defaultdict(list)
    for case in cases:
        cell = "a, b" if case.probe in ("P7", "P13") else case.cell
        cells[case.probe, cell].append(case)
    for (probe, cell), own in cells.items():
        yield probe, cell, own


def line(r: Result) -> str:
    depth = "-" if r.depth_tokens is None else r.depth_tokens
    return (
        f"| {r.probe} | {r.cell} | {r.passed} | {r.keep_tokens} | {depth} | {r.right}/{r.n} |"
        f" {r.same_bits}/{r.n} | {r.same_tokens}/{r.n} | {r.least_equal_tokens} |"
        f" {r.mean_equal_tokens:.1f} of {r.answer_tokens:.1f} | {r.logit_difference:.3g} |"
        f" {r.found_tokens:.0f} | {r.decode_encoder_rows:.0f} |"
    )


HEAD = (
    "| probe | cell | pass | keep | depth | right | all bits equal | tokens equal |"
    " least equal | mean equal | logits apart | found | decode rows |\n" + "|---" * 13 + "|"
)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="demo")
    parser.add_argument("--mode", choices=("exact", "replay"), default="exact")
    parser.add_argument("--cases", type=int, default=20, help="of each cell")
    parser.add_argument("--probes", nargs="*", default=[], help="only these")
    parser.add_argument("--keeps", type=int, nargs="+", help="default: window + 12")
    parser.add_argument("--depths", type=int, nargs="+", help="of replay; default: W, 2W, exact")
    parser.add_argument("--numerics", default="invariant", choices=("invariant", "fast"))
    parser.add_argument("--out", type=Path, required=True, help="results as JSON")
    a = parser.parse_args()
    torch.set_num_threads(1)
    pools = Pools(a.model, a.numerics)
    geometry, w = pools.geometry, pools.window_tokens
    keeps = a.keeps or [geometry.keep_for(0)]
    depths: list[int | None] = [None]
    if a.mode == "replay":
        depths = a.depths or [w, 2 * w, geometry.replay_rows]
    results = [Result(**r) for r in json.loads(a.out.read_text())] if a.out.is_file() else []
    done = {(r.mode, r.keep_tokens, r.depth_tokens, r.numerics, r.probe, r.cell) for r in results}
    cells = list(by_cell(all_cases(a.cases, a.probes)))
    began, asked_for = time.monotonic(), 0
    total = len(cells) * len(keeps) * len(depths)
    print(HEAD)
    for probe, cell, own in cells:
        cold = Cold(pools)
        for keep in keeps:
            for depth in depths:
                asked_for += 1
                place = (a.mode, keep, depth, a.numerics, probe, cell)
                if place in done:
                    continue
                asked = Grid(pools, keep, depth).ask(own, cold)
                names = ("mode", "keep_tokens", "depth_tokens", "numerics", "probe", "cell")
                head = dict(zip(names, place, strict=True))
                for name in ("cold", *PASSES):
                    results.append(asked.result(name, head))
                    print(line(results[-1]))
                a.out.write_text(json.dumps([asdict(r) for r in results], indent=1) + "\n")
                spent = time.monotonic() - began
                print(f"  {asked_for} of {total} cells, {spent:.0f} s", flush=True)


if __name__ == "__main__":
    main()
