"""Rows of pictures in an engine: where they stand, what they change, and what is refused."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch

from headrace.core.chain import TOKEN_TYPE, as_token_ids
from headrace.core.errors import InvalidRequest, PicturesMissing
from headrace.core.ids import Digest
from headrace.core.images import ImageSpan, span_block_digests
from headrace.core.request import GenRequest
from headrace.core.rows import plan_decode
from headrace.engine import BlockDone, Engine, Half, Job, SequenceFailed, TokenSampled
from headrace.model import CacheLayout, KvState, RowBatch, Trunk
from headrace.model.vision_rows import pack_rows

NewEngine = Callable[..., Engine]
NewRequest = Callable[..., GenRequest]

PICTURE_ROWS = 22
SPANS = (100, 300)  # the first crosses a block's end, the second ends in an incomplete block


def picture(seed: int, trunk: Trunk) -> torch.Tensor:
    """Seeded rows of one picture, on the tower's grid."""
    generator = torch.Generator().manual_seed(seed)
    shape = (PICTURE_ROWS, trunk.config.hidden_size)
    rows = torch.randn(shape, generator=generator, dtype=torch.float64)
    return torch.round(rows * 65536) / 65536


def with_pictures(
    request: GenRequest, starts: Sequence[int], digests: Sequence[int], image_token_id: int
) -> GenRequest:
    ids = as_token_ids(request.token_ids)
    spans = tuple(
        ImageSpan(start, PICTURE_ROWS, Digest(bytes([digest] * 32)))
        for start, digest in zip(starts, digests, strict=True)
    )
    for span in spans:
        ids[span.start : span.end] = array(TOKEN_TYPE, [image_token_id] * span.n_tokens)
    made = span_block_digests(request.chain_root, ids, spans)
    return replace(request, token_ids=ids, digests=made, images=spans)


def one_call(trunk: Trunk, request: GenRequest, rows: dict[Digest, torch.Tensor]) -> torch.Tensor:
    """Logits of the last row of the prompt in a single call, built by hand."""
    n, ids = request.n_tokens, list(request.token_ids)
    depth = trunk.config.engram_max_ngram_size
    image = [any(s.start <= p < s.end for s in request.images) for p in range(n)]
    embeddings = torch.zeros(n, trunk.config.hidden_size, dtype=torch.float64)
    for span in request.images:
        embeddings[span.start : span.end] = rows[span.digest]
    layout = CacheLayout.of(trunk.config)
    state = KvState(trunk.config, layout, layout.n_blocks(n), 1, trunk.numerics)
    zeros = torch.zeros(n, dtype=torch.int64)
    batch = RowBatch(
        history_ids=torch.tensor(
            [[ids[p - k] if p >= k else -1 for k in range(depth)] for p in range(n)]
        ),
        history_image=torch.tensor(
            [[p >= k and image[p - k] for k in range(depth)] for p in range(n)]
        ),
        positions=torch.arange(n),
        slots=zeros,
        sequence=zeros,
        block_tables=torch.arange(layout.n_blocks(n))[None],
        swa_floor=zeros,
        decoder_floor=torch.full((n,), request.first_decoder_row),
        write_floor=zeros,
        decoder=torch.arange(n) >= request.first_decoder_row,
        logits=torch.arange(n) == n - 1,
        embeddings=embeddings,
    )
    return trunk.forward(batch, state).logits[0]


def run(
    engine: Engine, request: GenRequest, rows: dict[Digest, torch.Tensor]
) -> tuple[list[torch.Tensor], list[int], dict[int, Digest], dict[int, bytes]]:
    """(logits of sampled rows, tokens, digest and bytes of every block)."""
    logits: list[torch.Tensor] = []
    engine.runner.on_logits = lambda key, position, row: logits.append(row.clone())
    tokens: list[int] = []
    digests: dict[int, Digest] = {}
    blocks: dict[int, bytes] = {}
    assert engine.admit(Job(request, as_token_ids([]), 0)) is not None
    plan = plan_decode(request.n_tokens, 0, request.keep_tokens, (), engine.geometry)
    assert engine.start(request.key, plan, None, rows)
    while engine.has_work:
        for event in engine.step():
            if isinstance(event, SequenceFailed):
                raise event.error
            if isinstance(event, TokenSampled):
                tokens.append(event.token_id)
            if isinstance(event, BlockDone):
                digests[event.index] = event.digest
                blocks[event.index] = bytes(engine.block_view(event.block))
    engine.release(request.key)
    engine.check_integrity()
    return logits, tokens, digests, blocks


def test_rows_stand_where_their_span_is(
    new_engine: NewEngine, new_request: NewRequest, t1: Trunk
) -> None:
    """Steps of 61 rows cut both spans; the oracle is one call with everything laid out by hand."""
    asked = with_pictures(new_request(330, max_tokens=60), SPANS, (1, 2), t1.config.image_token_id)
    rows = {span.digest: picture(i, t1) for i, span in enumerate(asked.images)}
    engine = new_engine(max_rows_per_step=61)
    logits, tokens, digests, blocks = run(engine, asked, rows)
    assert torch.equal(logits[0], one_call(t1, asked, rows))
    assert len(tokens) == 60

    # The chain over generated tokens goes on with what the second span left in its block.
    whole = asked.token_ids + as_token_ids(tokens[:-1])
    wanted = span_block_digests(asked.chain_root, whole, asked.images)
    assert len(wanted) == 3 and digests == dict(enumerate(wanted))
    assert wanted[2] != span_block_digests(asked.chain_root, whole, asked.images[:1])[2]

    # Another second picture: the blocks before it are the same bytes, those with it are not.
    other = rows | {asked.images[1].digest: picture(7, t1)}
    _, _, _, changed = run(new_engine(), asked, other)
    assert [changed[i] == blocks[i] for i in range(3)] == [True, True, False]


def test_ids_in_a_span_do_not_matter_and_ids_outside_are_text(
    new_engine: NewEngine, new_request: NewRequest, t1: Trunk
) -> None:
    """The mask comes from spans: an image id elsewhere is a token like any other."""
    plain = new_request(200, max_tokens=1)
    image_id = t1.config.image_token_id
    asked = with_pictures(plain, (90,), (1,), image_id)
    rows = {asked.images[0].digest: picture(0, t1)}
    logits, *_ = run(new_engine(), asked, rows)
    odd = as_token_ids(asked.token_ids)
    odd[95] = 17
    digests = span_block_digests(asked.chain_root, odd, asked.images)
    inside, *_ = run(new_engine(), replace(asked, token_ids=odd, digests=digests), rows)
    # An n-gram with a picture in it is dead, and an embedding is replaced whatever the id is.
    assert torch.equal(logits[0], inside[0])
    bare = replace(asked, images=())
    as_text, *_ = run(new_engine(), bare, {})
    assert not torch.equal(logits[0], as_text[0])


def test_a_run_without_its_rows_is_refused_and_changes_nothing(
    new_engine: NewEngine, new_request: NewRequest, t1: Trunk
) -> None:
    engine = new_engine()
    asked = with_pictures(new_request(200), (90,), (1,), t1.config.image_token_id)
    (span,) = asked.images
    plan = plan_decode(200, 0, asked.keep_tokens, (), engine.geometry)
    assert engine.admit(Job(asked, as_token_ids([]), 0)) is not None
    good = picture(0, t1)
    for rows in ({}, {span.digest: good[:-1]}, {span.digest: good.float()}):
        with pytest.raises(ValueError, match="rows of the picture at 90"):
            engine.start(asked.key, plan, None, rows)
    assert engine.start(asked.key, plan, None, {span.digest: good})
    engine.release(asked.key)
    engine.check_integrity()


def test_payloads_are_checked(new_engine: NewEngine, t1: Trunk) -> None:
    engine = new_engine(Half.ENCODER)
    span = ImageSpan(0, PICTURE_ROWS, Digest(bytes(32)))
    rows = picture(0, t1)
    payload = {span.digest: pack_rows(rows)}
    assert torch.equal(engine.unpack_pictures([span], payload)[span.digest], rows)
    with pytest.raises(PicturesMissing, match="rows of 1 pictures"):
        engine.unpack_pictures([span], {})
    for wrong in (rows[:-1], rows[:, :-1], rows.float()):
        with pytest.raises(PicturesMissing, match="not those of the picture"):
            engine.unpack_pictures([span], {span.digest: pack_rows(wrong.contiguous())})


def test_spans_out_of_order_are_no_request(new_request: NewRequest, t1: Trunk) -> None:
    asked = with_pictures(new_request(400), SPANS, (1, 2), t1.config.image_token_id)
    first, second = asked.images
    for images in ((second, first), (first, first), (replace(first, start=390),)):
        with pytest.raises(InvalidRequest, match="image span"):
            replace(asked, images=images)
