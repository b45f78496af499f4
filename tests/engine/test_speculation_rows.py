"""Verify steps through a runner's rows: whatever is drafted, greedy text and state are those of
plain decoding, bit for bit, on states full of NaN."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import product

import pytest
import torch

from headrace.core.chain import TokenIds, as_token_ids
from headrace.core.clock import SYSTEM_CLOCK
from headrace.core.ids import JobKey, RequestId
from headrace.core.request import Sampling
from headrace.engine.plan import Segment, StepPlan
from headrace.engine.runner import Runner
from headrace.engine.speculation import Anchor, Drafts, propose, verify_step
from headrace.model import CacheLayout, KvState, Trunk, pack_state, unpack_state

GREEDY = Sampling()
KEY = JobKey(RequestId("r"), 0)


@dataclass(frozen=True)
class Saved:
    """A copy of everything that rows may change."""

    length: int
    ids: list[int]
    blocks: torch.Tensor
    rings: torch.Tensor
    tails: torch.Tensor


class Decoding:
    """One sequence in a slot of a runner: its text and the length whose rows are valid."""

    def __init__(
        self,
        trunk: Trunk,
        prompt: TokenIds,
        *,
        runner: Runner | None = None,
        slot: int = 0,
        first_block: int = 0,
        sampling: Sampling = GREEDY,
        decoder_floor: int = 0,
    ) -> None:
        if runner is None:
            layout = CacheLayout.of(trunk.config, 6)
            state = KvState(trunk.config, layout, 6, 2, trunk.numerics, poison=True)
            runner = Runner(trunk, state, SYSTEM_CLOCK)
        self.runner, self.slot, self.sampling = runner, slot, sampling
        self.floor = decoder_floor
        self.blocks = list(range(first_block, first_block + 3))
        self.ids = [int(i) for i in prompt]
        runner.open(slot, prompt, self.blocks)
        self.length = 0
        self.plain(len(self.ids))

    def segment(self, n_rows: int) -> Segment:
        start, end = self.length, self.length + n_rows
        decoder_start = min(max(start, self.floor), end)
        key = JobKey(RequestId(f"r{self.slot}"), 0)
        return Segment(
            key, self.slot, start, end, decoder_start, 0, self.floor, 0, self.sampling, False
        )

    def plain(self, n_rows: int = 1) -> bytes:
        """Run rows of known tokens and draw the next; the last row's logits."""
        seen: list[bytes] = []
        self.runner.on_logits = lambda key, position, row: seen.append(row.numpy().tobytes())
        (part,) = self.runner.run(StepPlan((self.segment(n_rows),))).segments
        assert part.error is None and part.token_id is not None
        self.length += n_rows
        self.ids.append(part.token_id)
        return seen[0]

    def step(self, drafts: Drafts) -> int:
        """One verify step; how many drafts stayed."""
        return steps([self], [drafts])[0]

    def anchor(self, n_drafts: int) -> Anchor:
        assert len(self.ids) == self.length + 1
        return Anchor(self.slot, self.ids[-1], self.length, self.floor, self.sampling, n_drafts)

    def save(self) -> Saved:
        s = self.runner.state
        return Saved(
            self.length, list(self.ids), s.blocks.clone(), s.rings.clone(), s.tails.clone()
        )

    def load(self, saved: Saved) -> None:
        s = self.runner.state
        self.length, self.ids = saved.length, list(saved.ids)
        for target, source in (
            (s.blocks, saved.blocks),
            (s.rings, saved.rings),
            (s.tails, saved.tails),
        ):
            target.copy_(source)
        self.runner.accept(self.slot, 0, self.ids)

    def state(self) -> tuple[object, ...]:
        """All bytes that a reader may see: whole blocks, complete groups, windows, drafter rows.
        Tails are private float64 and may differ in the last bits."""
        state, whole = self.runner.state, self.length // 128
        packed = pack_state(state, self.slot, self.length, 0, self.blocks[whole])
        found = unpack_state(packed)
        blocks = [state.read_block(b) for b in self.blocks[:whole]]
        return (blocks, found.entries, found.slot.swa, found.slot.drafter)


def steps(sequences: Sequence[Decoding], drafts: Sequence[Drafts]) -> list[int]:
    segments = [
        one.segment(1 + len(guess.token_ids)) for one, guess in zip(sequences, drafts, strict=True)
    ]
    accepted = []
    verdicts = verify_step(sequences[0].runner, segments, drafts)
    for one, verdict in zip(sequences, verdicts, strict=True):
        assert verdict is not None and len(verdict.token_ids) == verdict.accepted + 1
        one.ids += verdict.token_ids
        one.length += len(verdict.token_ids)
        accepted.append(verdict.accepted)
    return accepted


def prompt_of(n: int, seed: int = 3) -> TokenIds:
    draw = random.Random(seed)
    return as_token_ids([draw.randrange(16, 3900) for _ in range(n)])


def scripted(text: Sequence[int], position: int, m: int, right: int) -> Drafts:
    """m drafts for `position` on: `right` true ones, then a wrong one, then true ones again."""
    tokens = list(text[position : position + m])
    if right < m:
        tokens[right] = 16 + (tokens[right] - 15) % 3000
    return Drafts(tuple(tokens))


@pytest.fixture(scope="module")
def texts(t1: Trunk) -> Callable[[int], list[int]]:
    """Plain greedy text that begins with the seeded prompt of n tokens; 20 tokens more."""
    known: dict[int, list[int]] = {}

    def text(n: int) -> list[int]:
        if n not in known:
            one = Decoding(t1, prompt_of(n))
            for _ in range(19):
                one.plain()
            known[n] = one.ids
        return known[n]

    return text


# Anchors whose steps cross a block's edge (128), a ring's wrap (76 = 2 * 38) and, at odd and even
# places, pairs of ratio 2.
@pytest.mark.parametrize("start", [124, 73])
def test_every_pattern_of_two_steps_is_plain_greedy(
    t1: Trunk, texts: Callable[[int], list[int]], start: int
) -> None:
    text = texts(start)
    one, straight = Decoding(t1, prompt_of(start)), Decoding(t1, prompt_of(start))
    states = {}
    begin = straight.save()
    for length in range(start + 1, start + 14):
        logits = straight.plain()
        states[length] = (straight.state(), logits)
    straight.load(begin)
    assert straight.ids == text[: start + 1]
    for first, second in product(range(6), repeat=2):
        one.load(begin)
        assert one.step(scripted(text, one.length + 1, 5, first)) == first
        assert one.ids == text[: start + first + 2]
        assert one.step(scripted(text, one.length + 1, 5, second)) == second
        assert one.length == start + first + second + 2
        assert one.ids == text[: one.length + 1]
        assert one.state() == states[one.length][0]
        if first == second:  # the row after shows no more than the bytes
            logits = one.plain()
            assert (one.state(), logits) == states[one.length]


def test_a_long_text_with_every_length_of_step(
    t1: Trunk, texts: Callable[[int], list[int]]
) -> None:
    """m and the number of right drafts change from step to step; also steps without drafts."""
    draw = random.Random(5)
    for start in (34, 118):
        text = texts(start)
        one = Decoding(t1, prompt_of(start))
        while one.length < start + 13:
            m = draw.randrange(6)
            right = draw.randrange(m + 1)
            assert one.step(scripted(text, one.length + 1, m, right)) == right
        assert one.ids == text[: len(one.ids)]


def test_sequences_that_share_a_step_get_the_verdicts_they_get_alone(
    t1: Trunk, texts: Callable[[int], list[int]]
) -> None:
    left = Decoding(t1, prompt_of(124))
    right = Decoding(t1, prompt_of(73), runner=left.runner, slot=1, first_block=3)
    for m, n in ((5, 2), (0, 5), (3, 3)):
        guesses = [
            scripted(texts(124), left.length + 1, m, m // 2),
            scripted(texts(73), right.length + 1, n, n),
        ]
        assert steps([left, right], guesses) == [m // 2, n]
    for one, start in ((left, 124), (right, 73)):
        assert one.ids == texts(start)[: len(one.ids)]


def test_the_drafter_s_own_drafts(t1: Trunk, texts: Callable[[int], list[int]]) -> None:
    """Random weights guess wrong, so the text is the test; drafts, not confidences, differ from
    those of a sequence elsewhere by nothing."""
    left = Decoding(t1, prompt_of(118))
    right = Decoding(t1, prompt_of(73), runner=left.runner, slot=1, first_block=3)
    for _ in range(4):
        both = propose(t1, left.runner.state, [left.anchor(5), right.anchor(3)])
        assert [len(d.token_ids) for d in both] == [5, 3]
        assert all(0 < c < 1 for d in both for c in d.confidences)
        (alone,) = propose(t1, left.runner.state, [right.anchor(3)])
        assert alone == both[1]
        steps([left, right], both)
    assert left.ids == texts(118)[: len(left.ids)]
    assert right.ids == texts(73)[: len(right.ids)]


def test_seeded_drafts_stay_when_the_laws_agree_and_draws_repeat(t1: Trunk) -> None:
    """With a temperature drafts carry the laws they came from, and the same step gives the same
    verdict."""
    warm = Sampling(temperature=0.9, top_p=0.95, seed=11)
    one = Decoding(t1, prompt_of(60), sampling=warm)
    begin = one.save()
    (first,) = propose(t1, one.runner.state, [one.anchor(4)])
    assert len(first.laws) == 4
    assert all(
        q[t] > 0 and abs(q.sum() - 1) < 1e-9
        for t, q in zip(first.token_ids, first.laws, strict=True)
    )
    one.step(first)
    ids = list(one.ids)
    one.load(begin)
    (again,) = propose(t1, one.runner.state, [one.anchor(4)])
    assert again.token_ids == first.token_ids
    one.step(again)
    assert one.ids == ids
    other = replace(one.anchor(4), sampling=replace(warm, seed=12))
    assert propose(t1, one.runner.state, [other])[0].token_ids != again.token_ids


def test_steps_that_cannot_be_are_refused(t1: Trunk) -> None:
    one = Decoding(t1, prompt_of(20))
    with pytest.raises(ValueError, match="3 rows for 1 drafts"):
        verify_step(one.runner, [one.segment(3)], [Drafts((40,))])
    with pytest.raises(ValueError, match="at most 6 rows, got 7"):
        verify_step(one.runner, [one.segment(7)], [Drafts((40,) * 6)])
    silent = replace(one.segment(2), sampling=None)
    with pytest.raises(ValueError, match="2 rows for 1 drafts"):
        verify_step(one.runner, [silent], [Drafts((40,))])
    with pytest.raises(ValueError, match="n_drafts must be between 0 and 5, got 6"):
        propose(t1, one.runner.state, [one.anchor(6)])
