"""Drafts and what becomes of them, as functions over the runner's rows.

A sequence's newest token, the anchor, stands at position a and has no row yet. `propose` drafts
the m tokens that may follow, `verify_step` runs the rows [a, a + m], which read the drafts' tokens
too, and decides from their logits. A token of the text at position p is then, with P the target's
law at p (temperature and top_p as in `sampler`) and Q the law that the draft d came from,

    greedy     the target's token; d stays iff it is that token
    otherwise  d iff uniform("accept", p) * Q(d) < P(d), else drawn from max(P - Q, 0), normalised

up to the first draft that does not stay; after m that stay the last row gives one token more by the
plain draw. The text has the law P, and greedy text is that of plain decoding, whatever the drafts.

All draws are functions of (purpose, seed, position). A position may be drafted again after a
rejection before it, with the same numbers: what rejected it used none of them, so the law stays.

Rows of rejected drafts lie behind the sequence's new length. Nothing reads them there, and they are
written again before the length reaches them: rings and tails hold B = m + 1 rows more than a
sequence needs, global KV of a group is written when its last token is verified.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from headrace.core.request import Sampling
from headrace.engine.plan import Segment
from headrace.engine.runner import Runner
from headrace.engine.sampler import draw, kept_by_top_p, sample, uniform
from headrace.model import DraftBatch, KvState, Trunk

Law = NDArray[np.float64]  # probabilities [vocab]


@dataclass(frozen=True, slots=True)
class Anchor:
    """Where a sequence stands: `position` of its newest token `token_id`, the first position whose
    decoder rows it has, and how many drafts it wants (at most the model's block)."""

    slot: int
    token_id: int
    position: int
    decoder_floor: int
    sampling: Sampling
    n_drafts: int


@dataclass(frozen=True, slots=True)
class Drafts:
    """Tokens for the positions after the anchor; `laws` is empty for greedy ones. `confidences`:
    the drafter's own estimate that each stays if those before it do."""

    token_ids: tuple[int, ...]
    laws: tuple[Law, ...] = ()
    confidences: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class Verdict:
    """`token_ids` are the text's next tokens: `accepted` drafts and one token more. The sequence's
    rows now end before the last of them."""

    token_ids: tuple[int, ...]
    accepted: int


def law(logits: NDArray[np.floating], sampling: Sampling) -> Law:
    """The probabilities that `sampler.draw` draws with, at a temperature above 0."""
    ids, sums = kept_by_top_p(logits, sampling)
    probabilities = np.zeros(len(logits))
    probabilities[ids] = np.diff(sums, prepend=0.0) / sums[-1]
    return probabilities


def propose(
    trunk: Trunk, state: KvState, anchors: Sequence[Anchor], temperatures: Sequence[float] = ()
) -> list[Drafts]:
    """Drafts of every sequence, their stages in one call; changes nothing.

    `temperatures` are the confidences'. A sequence's drafts end before one that is not a number.
    Raises `BatchError` as `Trunk.draft`, `ValueError` for more drafts than a block has."""
    most = trunk.config.dspark_block_size
    for anchor in anchors:
        if not 0 <= anchor.n_drafts <= most:
            raise ValueError(f"n_drafts must be between 0 and {most}, got {anchor.n_drafts}")
    columns = [(a.slot, a.token_id, a.position, a.decoder_floor) for a in anchors]
    block = trunk.draft(DraftBatch(*torch.tensor(columns).T), state, temperatures=temperatures)
    found = [_Growing(anchor) for anchor in anchors]
    previous = torch.tensor([anchor.token_id for anchor in anchors])
    for index in range(max(anchor.n_drafts for anchor in anchors)):
        logits, confidences = block.step(index, previous)
        for row, growing in enumerate(found):
            growing.take(index, logits[row], float(confidences[row]))
        previous = torch.tensor([growing.last for growing in found])
    return [growing.drafts() for growing in found]


class _Growing:
    """Drafts of one sequence while its block is refined."""

    def __init__(self, anchor: Anchor) -> None:
        self.anchor = anchor
        self.last = anchor.token_id
        self._tokens: list[int] = []
        self._laws: list[Law] = []
        self._confidences: list[float] = []

    def take(self, index: int, logits: torch.Tensor, confidence: float) -> None:
        anchor, place = self.anchor, self.anchor.position + 1 + index
        if index >= anchor.n_drafts or len(self._tokens) < index:
            return
        (token,) = sample(logits.unsqueeze(0), [Sampling()], [place])
        if token is None:
            return
        if anchor.sampling.temperature > 0:
            own = law(logits.cpu().numpy(), anchor.sampling)
            token = _draw(own, uniform(anchor.sampling.seed, place, b"draft"))
            self._laws.append(own)
        self._tokens.append(token)
        self._confidences.append(confidence)
        self.last = token

    def drafts(self) -> Drafts:
        return Drafts(tuple(self._tokens), tuple(self._laws), tuple(self._confidences))


def verify(
    logits: torch.Tensor, drafts: Drafts, sampling: Sampling, position: int
) -> Verdict | None:
    """The verdict on drafts for `position` and after, from the target's logits [m + 1, vocab] at
    position - 1 and after. None: a row that the verdict needs is not a number.

    Raises `ValueError` for another number of rows."""
    tokens, places = drafts.token_ids, range(position, position + len(drafts.token_ids) + 1)
    if len(logits) != len(places):
        raise ValueError(f"{len(tokens)} drafts need {len(places)} rows, got {len(logits)}")
    if sampling.temperature > 0:
        return _verify_draws(logits, drafts, sampling, position)
    best = sample(logits, [sampling] * len(places), places)
    accepted = 0
    while accepted < len(tokens) and best[accepted] == tokens[accepted]:
        accepted += 1
    last = best[accepted]
    return None if last is None else Verdict((*tokens[:accepted], last), accepted)


def _verify_draws(
    logits: torch.Tensor, drafts: Drafts, sampling: Sampling, position: int
) -> Verdict | None:
    tokens = drafts.token_ids
    for accepted, row in enumerate(logits.cpu().numpy()):
        place = position + accepted
        if not np.isfinite(row.max()):  # the maximum of a row with a NaN is NaN
            return None
        if accepted == len(tokens):
            return Verdict((*tokens, draw(row, sampling, place)), accepted)
        target, token, own = law(row, sampling), tokens[accepted], drafts.laws[accepted]
        if uniform(sampling.seed, place, b"accept") * own[token] < target[token]:
            continue
        rest = np.maximum(target - own, 0.0)
        # Laws that are equal but for rounding may leave nothing: then the target's own is right.
        token = _draw(rest if rest.any() else target, uniform(sampling.seed, place))
        return Verdict((*tokens[:accepted], token), accepted)
    raise AssertionError("the row after the last draft gives a verdict")


def _draw(weights: Law, u: float) -> int:
    """The id, in rising order, at which the running sum exceeds u times the whole."""
    sums = np.cumsum(weights)
    place = int(np.searchsorted(sums, u * sums[-1], side="right"))
    return min(place, int(np.flatnonzero(weights)[-1]))


def verify_step(
    runner: Runner, segments: Sequence[Segment], drafts: Sequence[Drafts]
) -> list[Verdict | None]:
    """Run one verify step: `segments` begin at their anchors and have one row a draft more, with
    `sampling`. The runner then knows the verdicts' tokens; a sequence's next row is that of the
    last. None where the model's output was not a number.

    Raises `ValueError` for segments that are not their drafts' or longer than the rings allow."""
    layout = runner.state.layout
    most = layout.ring_rows - layout.window_tokens
    for segment, guess in zip(segments, drafts, strict=True):
        n_rows = segment.end - segment.start
        if n_rows != len(guess.token_ids) + 1 or segment.sampling is None:
            raise ValueError(f"{segment.key}: {n_rows} rows for {len(guess.token_ids)} drafts")
        if n_rows > most:
            raise ValueError(f"{segment.key}: a verify step has at most {most} rows, got {n_rows}")
    logits = runner.run_drafts(segments, [guess.token_ids for guess in drafts])
    verdicts = []
    for segment, guess, rows in zip(segments, drafts, logits, strict=True):
        assert segment.sampling is not None
        verdict = verify(rows, guess, segment.sampling, segment.start + 1)
        if verdict is not None:
            runner.accept(segment.slot, segment.start + 1, verdict.token_ids)
        verdicts.append(verdict)
    return verdicts
