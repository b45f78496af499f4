"""One engine and one request at a time, with everything that it shows: what the tests of exactness
compare bit for bit.

All engines hand out blocks and slots filled with NaN and run `invariant` numerics; those that are
compared have other ring sizes, other block numbers and other step sizes.
"""

from __future__ import annotations

import random
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache

import torch

from headrace.core.chain import TOKEN_TYPE, as_token_ids
from headrace.core.ids import Digest, JobKey, RequestId
from headrace.core.images import ImageSpan
from headrace.core.request import FinishReason, GenRequest, Sampling
from headrace.core.rows import RowPlan, plan_decode
from headrace.engine import (
    BlockDone,
    Engine,
    EngineSettings,
    Half,
    Job,
    RowsDone,
    SequenceFailed,
    TokenSampled,
    WindowDone,
    spans_to_run,
)
from headrace.engine.speculation import Anchor, Drafts, propose
from headrace.model import KvState, SlotState, Trunk

ROOT = Digest(bytes(range(32)))
MAX_TOKENS = 4
PICTURE_ROWS = 22
IMAGE_TOKEN_ID = 4001


@dataclass
class Run:
    """Everything that one engine showed of one request."""

    max_tokens: int
    n_before: int = 0  # tokens of a former attempt
    tokens: list[int] = field(default_factory=list)
    logits: list[bytes] = field(default_factory=list)  # of every sampled row, in order
    done_blocks: dict[int, bytes] = field(default_factory=dict)  # from BlockDone
    windows: dict[int, bytes] = field(default_factory=dict)  # from WindowDone
    first_rows: tuple[int, int] = (0, 0)  # at the first token, or at RowsDone
    groups_written: int = 0
    held_blocks: list[bytes] = field(default_factory=list)  # all blocks with KV, at the end
    slot: SlotState | None = None  # at the end, all layers
    state: bytes = b""  # at the end, as mode `state` exports it
    # By a token's index, what the drafter guesses behind it; nothing of the engine's text.
    drafts: dict[int, Drafts] = field(default_factory=dict)
    every_draft: bool = False  # of all tokens, not of the first and the last alone


def request(
    n_tokens: int,
    keep_tokens: int,
    pictures: Sequence[int] = (),
    max_tokens: int = MAX_TOKENS,
    *,
    vocab_size: int = 4096,
) -> GenRequest:
    """The same text for the same length; `pictures` are where spans begin."""
    draw = random.Random(7)
    ids = as_token_ids([draw.randrange(16, min(3900, vocab_size)) for _ in range(n_tokens)])
    spans = tuple(
        ImageSpan(start, PICTURE_ROWS, Digest(bytes([number + 1] * 32)))
        for number, start in enumerate(pictures)
    )
    for span in spans:
        ids[span.start : span.end] = array(TOKEN_TYPE, [IMAGE_TOKEN_ID] * span.n_tokens)
    return GenRequest.offline(
        ROOT,
        ids,
        keep_tokens=keep_tokens,
        max_tokens=max_tokens,
        name=RequestId("r"),
        images=spans,
    )


@cache
def picture_rows(digest: Digest, hidden_size: int) -> torch.Tensor:
    """Seeded rows on the grid of 2^-16, as a tower gives them."""
    generator = torch.Generator().manual_seed(digest[0])
    shape = (PICTURE_ROWS, hidden_size)
    rows = torch.randn(shape, generator=generator, dtype=torch.float64)
    return torch.round(rows * 65536) / 65536


def make_engine(
    trunk: Trunk, half: Half, *, rows: int, backtrack_rows: int, spacing: int = 8192
) -> Engine:
    engine = Engine(
        trunk,
        EngineSettings(n_blocks=12, n_slots=2, max_rows_per_step=rows, replay_rows_per_step=rows),
        half,
        record_spacing_tokens=spacing,
        poison=True,
        backtrack_rows=backtrack_rows,
    )
    if half is Half.FULL:
        # Shift block and slot numbers, so that no two engines use the same ones.
        admitted = engine.admit(
            Job(request(300, 128, vocab_size=trunk.config.vocab_size), as_token_ids([]), 0)
        )
        assert admitted is not None
        engine.release(admitted.key)
    return engine


def run_engine(
    engine: Engine,
    job: GenRequest,
    hit_blocks: int,
    plan: RowPlan,
    store: dict[Digest, bytes],
    window: bytes | None,
    *,
    generated: Sequence[int] = (),
    state: bytes | None = None,
    every_draft: bool = False,
) -> Run:
    """Run `plan`, or with `state` take that over in its place; `generated` are tokens of a former
    attempt."""
    run = Run(max_tokens=job.max_tokens, n_before=len(generated), every_draft=every_draft)
    engine.runner.on_logits = lambda key, position, row: run.logits.append(row.numpy().tobytes())
    admission = engine.admit(Job(job, as_token_ids(list(generated)), hit_blocks))
    assert admission is not None
    for fill in admission.fills:
        assert engine.write_fill(fill, store[fill.digest])
    needed = spans_to_run(job, plan)  # rows of others are not there, and must not be missed
    width = engine.model.config.hidden_size
    pictures = {span.digest: picture_rows(span.digest, width) for span in needed}
    if state is None:
        assert engine.start(job.key, plan, window, pictures)
    else:
        assert engine.adopt(job.key, state)
    original = engine.runner.run

    def counting(step):  # type: ignore[no-untyped-def]
        result = original(step)
        run.groups_written += result.groups_written
        return result

    engine.runner.run = counting  # type: ignore[method-assign]
    while engine.has_work:
        for event in engine.step():
            take(engine, event, run)
    collect(engine, job.key, run)
    engine.release(job.key)
    engine.check_integrity()
    assert engine.stats().held_blocks == 0
    return run


def take(engine: Engine, event: object, run: Run) -> None:
    match event:
        case SequenceFailed(error=error):
            raise error
        case BlockDone(index=index, block=block):
            run.done_blocks[index] = bytes(engine.block_view(block))
        case WindowDone(position=position, payload=payload):
            run.windows[position] = payload
        case TokenSampled():
            if not run.tokens:
                run.first_rows = (event.encoder_rows, event.decoder_rows)
            run.tokens.append(event.token_id)
            assert event.index == run.n_before + len(run.tokens) - 1
            assert (event.finish is FinishReason.LENGTH) == (event.index == run.max_tokens - 1)
            wanted = run.every_draft or len(run.tokens) == 1 or event.finish is not None
            if wanted and engine.model.config.num_nextn_predict_layers:
                run.drafts[event.index] = draft(engine, event.key)
        case RowsDone():
            run.first_rows = (event.encoder_rows, event.decoder_rows)


def draft(engine: Engine, key: JobKey) -> Drafts:
    """A greedy block behind a sequence's newest token."""
    sequence = engine.scheduler.sequence(key)
    assert sequence is not None and sequence.plan is not None
    slot, floor = sequence.lease.slot, sequence.plan.decoder_floor
    return draft_from(engine.model, engine.state, slot, sequence.ids[-1], sequence.next_row, floor)


def draft_from(
    trunk: Trunk, state: KvState, slot: int, token_id: int, position: int, floor: int
) -> Drafts:
    anchor = Anchor(slot, token_id, position, floor, Sampling(), trunk.config.dspark_block_size)
    (drafts,) = propose(trunk, state, [anchor])
    assert len(drafts.token_ids) == trunk.config.dspark_block_size  # no NaN was read
    return drafts


def collect(engine: Engine, key: JobKey, run: Run) -> None:
    (sequence,) = (s for s in engine.scheduler.sequences() if s.key == key)
    length = sequence.next_row
    used = engine.state.layout.n_blocks(length)
    if engine.half is Half.FULL:
        run.held_blocks = [engine.state.read_block(b) for b in sequence.lease.blocks[:used]]
        run.slot = engine.state.export_slot(sequence.lease.slot, length)
        run.state = engine.export_state(key)


@cache
def cold_run(
    trunk: Trunk,
    n_tokens: int,
    keep_tokens: int,
    pictures: tuple[int, ...] = (),
    max_tokens: int = MAX_TOKENS,
) -> Run:
    """The `all` engine, with a window record at every grain."""
    job = request(n_tokens, keep_tokens, pictures, max_tokens, vocab_size=trunk.config.vocab_size)
    engine = make_engine(trunk, Half.FULL, rows=512, backtrack_rows=6, spacing=128)
    plan = plan_decode(n_tokens, 0, keep_tokens, (), engine.geometry)
    run = run_engine(engine, job, 0, plan, {}, None, every_draft=True)
    decoder_rows = min(n_tokens, keep_tokens) if engine.geometry.has_decoder_half else 0
    assert run.first_rows == (n_tokens, decoder_rows)
    assert sorted(run.windows) == list(range(128, n_tokens + max_tokens, 128))
    return run
