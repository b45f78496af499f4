"""Two engines that cut steps, blocks, slots and rings differently go on with each other's texts,
and every further logit, draft and stored byte is that of the run that never moved."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import pytest
import torch

from headrace.core.chain import as_token_ids
from headrace.core.request import GenRequest, Sampling
from headrace.core.rows import RowPlan, plan_decode
from headrace.engine import (
    Engine,
    EngineSettings,
    Fill,
    Half,
    Job,
    SequenceFailed,
    TokenSampled,
)
from headrace.engine.speculation import Anchor, propose
from headrace.model import Numerics, Trunk, load_named, unpack_state

N, MAX_TOKENS = 250, 12  # after six tokens a block ends exactly: rows = N + tokens - 1
CUTS = (1, 6, 7, 8)  # tokens after which a sequence moves
SEEDED = Sampling(temperature=0.9, seed=11)
Moved = tuple[bytes, list[bytes]]


@dataclass
class Text:
    """What a run of the request showed so far; logits as bytes by position."""

    ids: list[int] = field(default_factory=list)
    logits: dict[int, bytes] = field(default_factory=dict)
    drafts: dict[int, tuple[object, ...]] = field(default_factory=dict)


class Side:
    """An engine in use: others' blocks are resident and a stranger holds a slot."""

    def __init__(self, trunk: Trunk, ring: int | None, **sizes: int) -> None:
        backtrack = sizes.pop("backtrack_rows")
        settings = EngineSettings(**sizes)
        self.engine = Engine(
            trunk,
            settings,
            Half.FULL,
            record_spacing_tokens=8192,
            poison=True,
            backtrack_rows=backtrack,
            ring_rows=ring,
        )

    def admit(self, request: GenRequest, ids: Sequence[int] = (), hits: int = 0) -> list[Fill]:
        admission = self.engine.admit(Job(request, as_token_ids(ids), hits))
        assert admission is not None
        return list(admission.fills)

    def start(self, request: GenRequest) -> None:
        self.admit(request)
        assert self.engine.start(request.key, self.plan(request))

    def plan(self, request: GenRequest) -> RowPlan:
        return plan_decode(request.n_tokens, 0, request.keep_tokens, (), self.engine.geometry)

    def run(self, request: GenRequest, text: Text, until: int = MAX_TOKENS) -> None:
        """Steps until the text has `until` tokens, drafting after each."""

        def see(key, position: int, row: torch.Tensor) -> None:
            if key == request.key:
                text.logits[position] = row.numpy().tobytes()

        self.engine.runner.on_logits = see
        while len(text.ids) < until:
            for event in self.engine.step():
                assert not isinstance(event, SequenceFailed), event
                if isinstance(event, TokenSampled) and event.key == request.key:
                    assert event.index == len(text.ids)
                    text.ids.append(event.token_id)
                    if event.finish is None:
                        self.draft(request, text)

    def draft(self, request: GenRequest, text: Text) -> None:
        trunk, sequence = self.engine.model, self.engine.scheduler.sequence(request.key)
        if trunk.params.drafter is None:
            return
        floor = max(0, request.n_tokens - request.keep_tokens)
        length = request.n_tokens + len(text.ids) - 1
        anchor = Anchor(sequence.lease.slot, text.ids[-1], length, floor, request.sampling, 5)
        (drafts,) = propose(trunk, self.engine.state, [anchor])
        laws = tuple(one.tobytes() for one in drafts.laws)
        text.drafts[length] = (drafts.token_ids, laws, drafts.confidences)
        assert len(drafts.token_ids) == 5

    def give(self, request: GenRequest) -> Moved:
        """The sequence as bytes; nothing of it stays here but resident blocks."""
        blocks = [bytes(view) for _, view in self.engine.parking.complete_blocks(request.key)]
        payload = self.engine.export_state(request.key)
        self.engine.release(request.key)
        self.engine.check_integrity()
        return payload, blocks

    def take(self, request: GenRequest, moved: Moved, text: Text, *, twice: bool = False) -> None:
        payload, blocks = moved
        ids = text.ids if len(text.ids) > 1 else ()  # the first token comes with the state
        for fill in self.admit(request, ids, len(blocks)):
            source = blocks[0 if twice else fill.index]
            assert self.engine.write_fill(fill, source)
        assert self.engine.adopt(request.key, payload, self.plan(request) if ids else None)
        if not ids:
            text.ids.clear()  # it is told again, as an event of the next step

    def blocks_of(self, request: GenRequest) -> list[int]:
        return list(self.engine.scheduler.sequence(request.key).lease.blocks)


def stored(moved: Moved) -> tuple[object, ...]:
    """The bytes of a sequence that anybody may read. Tails are private float64."""
    found = unpack_state(moved[0])
    slot = found.slot
    return moved[1], found.entries, slot.swa, slot.drafter, slot.length_tokens, found.anchor


@pytest.fixture(scope="module", params=["t1", "v4-toy"])
def trunks(request) -> tuple[Trunk, Trunk, int]:
    """A model loaded twice, and what its prefills keep."""
    torch.set_num_threads(1)
    one, other = (load_named(request.param, 0, Numerics.INVARIANT) for _ in range(2))
    return one, other, 1 if one.config.is_v4 else one.config.sliding_window + 12


@pytest.fixture
def sides(trunks, new_request) -> Callable[[], tuple[Side, Side]]:
    def build() -> tuple[Side, Side]:
        one, other, keep = trunks
        window = one.config.sliding_window
        plain = Side(one, None, n_blocks=16, n_slots=4, backtrack_rows=6)
        cut = Side(
            other,
            window + 41,
            n_blocks=9,
            n_slots=3,
            backtrack_rows=9,
            max_rows_per_step=37,
            replay_rows_per_step=13,
        )
        # One stranger's block lies resident, one decodes all along, and two gave their blocks back
        # in the order that hands them out in reverse.
        strangers = [
            small(new_request, n, tokens, keep, one, f"s{n}", 20 + n)
            for n, tokens in ((140, 2), (30, 100), (31, 50), (32, 50))
        ]
        for stranger in strangers:
            cut.start(stranger)
            cut.run(stranger, Text(), 2)
            if stranger is strangers[0]:
                cut.engine.release(stranger.key)
        for stranger in strangers[2:]:
            cut.engine.release(stranger.key)
        return plain, cut

    return build


def small(new_request, n: int, tokens: int, keep: int, trunk: Trunk, name: str, seed: int):
    ids = [31 + (i * 131 + seed * 977) % (trunk.config.vocab_size - 200) for i in range(n)]
    return new_request(ids, name=name, max_tokens=tokens, keep_tokens=keep, sampling=SEEDED)


@pytest.fixture
def subject(trunks, new_request) -> GenRequest:
    one, _, keep = trunks
    return small(new_request, N, MAX_TOKENS, keep, one, "moved", 5)


@pytest.fixture
def whole(sides, subject) -> tuple[Text, Moved]:
    """The run that never moves, and its state one token before the end."""
    side, text = sides()[0], Text()
    side.start(subject)
    side.run(subject, text, MAX_TOKENS - 1)
    end = side.engine.export_state(subject.key)
    blocks = [bytes(view) for _, view in side.engine.parking.complete_blocks(subject.key)]
    side.run(subject, text)
    return text, (end, blocks)


@pytest.mark.parametrize("first", [0, 1], ids=["plain-first", "cut-first"])
def test_a_sequence_goes_there_and_back(sides, subject, whole, first: int) -> None:
    wanted, end = whole
    pair = sides()
    home, away = pair[first], pair[1 - first]
    text, places = Text(), []
    home.start(subject)
    for number, cut in enumerate((*CUTS, MAX_TOKENS - 1)):
        here, there = (home, away) if number % 2 == 0 else (away, home)
        here.run(subject, text, cut)
        places.append(here.blocks_of(subject))
        moved = here.give(subject)
        assert unpack_state(moved[0]).slot.length_tokens == N + cut - 1
        assert len(moved[1]) == (N + cut - 1) // 128
        there.take(subject, moved, text)
    assert stored(moved) == stored(end)
    there.run(subject, text)
    assert text.ids == wanted.ids
    assert text.logits == wanted.logits
    assert sorted(text.logits) == list(range(N - 1, N + MAX_TOKENS - 1))
    assert text.drafts == wanted.drafts
    assert places[0] != places[1]  # the block tables were others
    there.engine.check_integrity()


def test_the_engines_are_cut_differently(sides, subject) -> None:
    """Else the exchange would show nothing: steps, rings, tails, slots and pools are others."""
    plain, cut = sides()
    steps = []
    for side in (plain, cut):
        side.start(subject)
        before = side.engine.stats().steps
        side.run(subject, Text(), 1)
        steps.append(side.engine.stats().steps - before)
    assert steps[0] <= 2 and steps[1] >= N // 37
    a, b = plain.engine.state, cut.engine.state
    assert a.rings.shape != b.rings.shape and a.blocks.shape != b.blocks.shape
    assert [t.rows for t in a.layout.tails] != [t.rows for t in b.layout.tails]
    lease = cut.engine.scheduler.sequence(subject.key).lease
    assert lease.slot != plain.engine.scheduler.sequence(subject.key).lease.slot
    assert lease.blocks != sorted(lease.blocks)


def test_a_block_in_anothers_place_is_noticed(sides, subject, whole) -> None:
    """With its first block in both places the sequence's logits are others. (The order of blocks
    is not: entries carry their positions, and attention sees a set.)"""
    plain, cut = sides()
    text = Text()
    plain.start(subject)
    plain.run(subject, text, 8)
    cut.take(subject, plain.give(subject), text, twice=True)
    cut.run(subject, text, 9)
    assert text.logits[N + 7] != whole[0].logits[N + 7]
