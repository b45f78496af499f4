"""Modes `state` and `replay`, and a resume, with and without pictures, by all their bytes.

`state` and a resume are held against one cold engine. `replay` is approximate, so its yardstick is
a run of the same rows laid out by hand, one call of the model for all of them, without an engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import pytest
import torch
from headrace_tests_flow_engines import (
    Run,
    cold_run,
    draft_from,
    make_engine,
    picture_rows,
    request,
    run_engine,
)

from headrace.core.chain import as_token_ids
from headrace.core.ids import Digest
from headrace.core.images import span_block_digests
from headrace.core.request import GenRequest
from headrace.core.rows import (
    Geometry,
    StartKind,
    plan_adopted,
    plan_decode,
    plan_prefill,
    plan_resume,
)
from headrace.engine import Half, spans_to_run
from headrace.model import CacheLayout, KvState, Numerics, RowBatch, SlotState, Trunk, load_named
from headrace.model.slot_bytes import unpack_state

N_OUT = 24
GEOMETRY = {"t1": Geometry(32, 6, 6), "t2": Geometry(128, 6, 6)}
# N = 500, keep 44: F = 456. Spans of 22 rows: over the ends of the blocks 0, 1 and 2 (376 is H and
# the window's place, too), over two starts of a replay (224, 352), across F, ending at N.
SPANS = (118, 210, 245, 345, 376, 446, 478)


@pytest.fixture(scope="module")
def trunks() -> dict[str, Trunk]:
    torch.set_num_threads(1)
    return {name: load_named(name, 0, Numerics.INVARIANT) for name in GEOMETRY}


def by_digest(job: GenRequest, blocks: dict[int, bytes]) -> dict[Digest, bytes]:
    return {digest: blocks[i] for i, digest in enumerate(job.digests) if i in blocks}


def from_block(run: Run, first: int) -> dict[int, bytes]:
    return {i: block for i, block in run.done_blocks.items() if i >= first}


def check_state(run: Run, wanted: Run) -> None:
    """The same private state: windows, the anchor and the groups of the incomplete block bit for
    bit. Tails are not quantised, so they have the noise of fp64 when other rows shared the call
    (decisions/0003)."""
    one, other = unpack_state(run.state), unpack_state(wanted.state)
    assert (one.anchor, one.entries) == (other.anchor, other.entries)
    check_slot(one.slot, other.slot)


def check_slot(slot: SlotState, wanted: SlotState) -> None:
    assert replace(slot, tails=b"") == replace(wanted, tails=b"")
    pair = (bytearray(s.tails) for s in (slot, wanted))
    tails, others = (torch.frombuffer(data, dtype=torch.float64) for data in pair)
    torch.testing.assert_close(tails, others, rtol=1e-12, atol=1e-12)


# ---- state -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "n_tokens", "keep", "pictures", "hit"),
    [
        ("t1", 500, 44, (), 0),
        ("t1", 500, 44, SPANS, 0),
        ("t1", 500, 44, SPANS, 1),  # prefill starts from a block and a record that it found
        ("t1", 512, 44, (490,), 1),  # no block is incomplete at N
        ("t1", 301, 187, (100, 279), 0),  # an odd N: the last group has half of its rows
        ("t2", 500, 140, SPANS, 0),
    ],
)
def test_state_equals_the_all_engine(
    trunks: dict[str, Trunk],
    model: str,
    n_tokens: int,
    keep: int,
    pictures: Sequence[int],
    hit: int,
) -> None:
    trunk, job = trunks[model], request(n_tokens, keep, pictures, N_OUT)
    wanted, n_blocks = cold_run(trunk, n_tokens, keep, tuple(pictures), N_OUT), n_tokens // 128
    first = make_engine(trunk, Half.FULL, rows=77, backtrack_rows=3)
    windows = {128: wanted.windows[128]} if hit else {}
    plan = plan_decode(n_tokens, hit * 128, keep, windows, GEOMETRY[model])
    stored = by_digest(job, {i: wanted.done_blocks[i] for i in range(hit)})
    made = run_engine(
        first, replace(job, max_tokens=1), hit, plan, stored, windows.get(plan.window_position)
    )
    assert plan.kind is (StartKind.WINDOW if hit else StartKind.COLD)
    assert (made.logits, made.tokens) == (wanted.logits[:1], wanted.tokens[:1])
    assert made.done_blocks == {i: wanted.done_blocks[i] for i in range(hit, n_blocks)}

    second = make_engine(trunk, Half.FULL, rows=203, backtrack_rows=9)
    plan = plan_adopted(n_tokens, keep, GEOMETRY[model])
    assert spans_to_run(job, plan) == ()  # no row of a picture is needed any more
    store = stored | by_digest(job, made.done_blocks)
    run = run_engine(second, job, n_blocks, plan, store, None, state=made.state)
    assert run.first_rows == (0, 0)
    assert (run.logits, run.tokens) == (wanted.logits[1:], wanted.tokens)
    check_state(run, wanted)
    assert run.drafts == {i: wanted.drafts[i] for i in (0, N_OUT - 1)}
    # What is adopted of an incomplete block is its complete groups: `check_state` has those.
    whole = (n_tokens + N_OUT - 1) // 128
    assert run.held_blocks[:whole] == wanted.held_blocks[:whole]
    assert run.done_blocks == from_block(wanted, n_blocks)


# ---- resume ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("g", "stored"),
    [
        *((1, "all"), (11, "two blocks"), (12, "without record"), (13, "all")),
        *((13, "without record"), (14, "nothing"), (22, "two blocks"), (23, "all")),
    ],
)
def test_a_resume_equals_the_all_engine(trunks: dict[str, Trunk], g: int, stored: str) -> None:
    """512 = 500 + 12: with 13 tokens the block with the picture before N is complete and found."""
    trunk, job, n_known = trunks["t1"], request(500, 44, SPANS, N_OUT), 500 + g
    wanted = cold_run(trunk, 500, 44, SPANS, N_OUT)
    found = {"two blocks": 2, "nothing": 0}.get(stored, (n_known - 1) // 128)
    windows = (384,) if stored == "all" else ()
    plan = plan_resume(n_known, found * 128, 456, windows, GEOMETRY["t1"])
    assert plan.decoder_start == 456
    start = {"all": 384, "without record": 198, "two blocks": 70, "nothing": 0}[stored]
    if stored == "without record" and found == 4:
        start = 456 - 186
    assert plan.start == start
    engine = make_engine(trunk, Half.FULL, rows=203, backtrack_rows=9)
    known = job.token_ids + as_token_ids(wanted.tokens[:g])
    digests = span_block_digests(job.chain_root, known, job.images)[:found]
    store = {digest: wanted.done_blocks[i] for i, digest in enumerate(digests)}
    window = wanted.windows[384] if plan.kind is StartKind.WINDOW else None
    run = run_engine(engine, job, found, plan, store, window, generated=wanted.tokens[:g])
    assert run.first_rows == (plan.encoder_rows, n_known - 456)
    assert (run.logits, run.tokens) == (wanted.logits[g:], wanted.tokens[g:])
    check_state(run, wanted)
    assert run.drafts == {i: wanted.drafts[i] for i in (g, N_OUT - 1)}
    assert run.held_blocks == wanted.held_blocks
    assert run.done_blocks == from_block(wanted, found)


# ---- replay ----------------------------------------------------------------------------------


@dataclass
class ByHand:
    """A state of its own and calls of the model whose rows are laid out here."""

    trunk: Trunk
    job: GenRequest
    blocks: dict[int, bytes]  # what is stored
    ids: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        trunk, n_most = self.trunk, self.job.n_tokens + N_OUT
        self.layout = CacheLayout.of(trunk.config, 6)
        self.n_blocks = self.layout.n_blocks(n_most)
        self.state = KvState(
            trunk.config, self.layout, self.n_blocks, 1, trunk.numerics, poison=True
        )
        for i, block in self.blocks.items():
            self.state.write_block(i, block)
        self.ids = list(self.job.token_ids)
        self.image = [any(s.start <= p < s.end for s in self.job.images) for p in range(n_most)]

    def call(
        self, begin: int, end: int, *, floor: int, decoder_from: int, write_floor: int
    ) -> torch.Tensor:
        """Rows [begin, end), those from `decoder_from` through the decoder half too; logits of the
        last one if it is among these. `floor`: first position with encoder windows."""
        n, config = end - begin, self.trunk.config
        rows, depth = range(begin, end), config.engram_max_ngram_size
        embeddings = torch.zeros(n, config.hidden_size, dtype=torch.float64)
        for span in self.job.images:
            shown = picture_rows(span.digest, config.hidden_size)
            for p in range(max(span.start, begin), min(span.end, end)):
                embeddings[p - begin] = shown[p - span.start]
        decoder = torch.tensor([p >= decoder_from for p in rows])
        last = torch.arange(n) == n - 1
        zeros = torch.zeros(n, dtype=torch.int64)
        batch = RowBatch(
            history_ids=torch.tensor(
                [[self.ids[p - k] if p >= k else -1 for k in range(depth)] for p in rows]
            ),
            history_image=torch.tensor(
                [[p >= k and self.image[p - k] for k in range(depth)] for p in rows]
            ),
            positions=torch.arange(begin, end),
            slots=zeros,
            sequence=zeros,
            block_tables=torch.arange(self.n_blocks)[None],
            swa_floor=zeros + floor,
            decoder_floor=zeros + decoder_from,
            write_floor=zeros + write_floor,
            decoder=decoder,
            logits=last & decoder,
            embeddings=embeddings,
        )
        return self.trunk.forward(batch, self.state).logits

    def answer(self, start: int, hit: int, first: int) -> tuple[list[bytes], list[int]]:
        """Logits and tokens of a greedy answer: the prompt's rows in one call, then row by row."""
        floors = {"floor": start, "decoder_from": first, "write_floor": hit}
        logits = [self.call(start, self.job.n_tokens, **floors)[0]]
        while len(logits) < N_OUT:
            self.ids.append(int(logits[-1].argmax()))
            n = len(self.ids)
            logits.append(self.call(n - 1, n, **floors)[0])
        tokens = [*self.ids[self.job.n_tokens :], int(logits[-1].argmax())]
        return [row.numpy().tobytes() for row in logits], tokens

    def block(self, i: int) -> bytes:
        return self.state.read_block(i)

    def slot(self) -> SlotState:
        return self.state.export_slot(0, len(self.ids))


# depth -> first row of prefill (R = 256) and of decode (R = 384)
DEPTHS = {32: (224, 352), 64: (192, 320), 186: (70, 198)}


@pytest.mark.parametrize("pictures", [(), SPANS], ids=["text", "pictures"])
@pytest.mark.parametrize("depth", DEPTHS)
def test_replay_equals_the_same_rows_laid_out_by_hand(
    trunks: dict[str, Trunk], depth: int, pictures: tuple[int, ...]
) -> None:
    """Two exact blocks are stored; prefill goes on from them with the depth, and decode from what
    prefill made. N = 500, keep 44."""
    trunk, job, (s1, s2) = trunks["t1"], request(500, 44, pictures, N_OUT), DEPTHS[depth]
    exact, geometry = cold_run(trunk, 500, 44, pictures, N_OUT), GEOMETRY["t1"]
    stored = {i: exact.done_blocks[i] for i in (0, 1)}

    plan = plan_prefill(500, 256, 44, (), geometry, depth_tokens=depth)
    bounded = StartKind.REPLAY if depth == 186 else StartKind.BOUNDED
    assert (plan.start, plan.end, plan.kind) == (s1, 384, bounded)
    half = make_engine(trunk, Half.ENCODER, rows=77, backtrack_rows=3)
    made = run_engine(half, job, 2, plan, by_digest(job, stored), None)
    hand = ByHand(trunk, job, stored)
    hand.call(s1, 384, floor=s1, decoder_from=384, write_floor=256)
    assert made.done_blocks == {2: hand.block(2)}
    assert [hand.block(i) for i in (0, 1)] == [stored[0], stored[1]]
    assert depth == 186 or made.windows == {}  # an approximate run makes no record
    assert (made.done_blocks[2] == exact.done_blocks[2]) == (depth == 186)

    stored |= made.done_blocks
    plan = plan_decode(500, 384, 44, (), geometry, depth_tokens=depth)
    assert (plan.start, plan.decoder_start, plan.kind) == (s2, 456, bounded)
    full = make_engine(trunk, Half.FULL, rows=203, backtrack_rows=9)
    run = run_engine(full, job, 3, plan, by_digest(job, stored), None)
    hand = ByHand(trunk, job, stored)
    logits, tokens = hand.answer(s2, 384, 456)
    assert (run.logits, run.tokens) == (logits, tokens)
    assert run.slot is not None
    check_slot(run.slot, hand.slot())
    last = draft_from(trunk, hand.state, 0, tokens[-1], len(hand.ids), 456)
    assert run.drafts[N_OUT - 1] == last
    assert run.held_blocks[:3] == [stored[i] for i in range(3)]
    assert run.done_blocks == {3: hand.block(3)}
    assert (run.logits == exact.logits) == (depth == 186)
    assert depth == 186 or run.windows == {}
    if depth == 186:
        assert (run.tokens, run.held_blocks) == (exact.tokens, exact.held_blocks)
        check_state(run, exact)
