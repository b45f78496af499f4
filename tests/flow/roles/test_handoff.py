"""A request over prefill, store and decode equals one engine with the same keep; the rows that ran
are those of the formulas, as counted in the runners."""

from __future__ import annotations

import asyncio

import pytest

from headrace.core import faults
from headrace.core.chain import block_digests
from headrace.core.request import FinishReason
from headrace.core.rows import StartKind, floor_grain, plan_decode, plan_resume, record_position
from headrace.kvstore import Kind

MODEL = "t1"
pytestmark = pytest.mark.asyncio(loop_scope="module")

KEEP = {"window": 32, "default": 44, "two windows": 64, "exact halo": 187}


def rows_of(replica) -> tuple[int, int]:
    stats = replica.driver.stats
    return stats.encoder_rows_total, stats.decoder_rows_total


@pytest.mark.parametrize(
    ("n_tokens", "keep"),
    [
        (172, "default"),  # keep + 128: the shortest prompt for which a record is made
        (256, "window"),
        (257, "two windows"),
        (383, "default"),
        (384, "exact halo"),
        (640, "two windows"),
        (1000, "default"),
    ],
)
async def test_a_forced_handoff_equals_one_engine(
    cluster, yardstick, prompt, n_tokens: int, keep: str
) -> None:
    ids, keep_tokens = prompt(n_tokens, f"handoff {n_tokens}"), KEEP[keep]
    before, decoded = rows_of(cluster.prefill), rows_of(cluster.decodes[0])
    call = await cluster.handoff(cluster.request(ids, keep_tokens=keep_tokens))
    assert await call.result() == await yardstick.text(ids, 8, keep_tokens)
    assert call.finish is FinishReason.LENGTH
    await cluster.at_rest()

    hit, p = floor_grain(n_tokens), record_position(n_tokens, keep_tokens)
    assert rows_of(cluster.prefill) == (before[0] + hit, 0)
    assert call.prefilled is not None and call.prefilled.encoder_rows == hit > 0
    plan = plan_decode(n_tokens, hit, keep_tokens, (p,) if p else (), yardstick.geometry)
    times = call.times
    assert (times.encoder_rows, times.decoder_rows) == (plan.encoder_rows, plan.decoder_rows)
    assert (times.hit_tokens, times.window_position) == (hit, p)
    assert times.encoder_rows <= max(n_tokens - hit, keep_tokens + 127)
    # Seven more rows of either half made the other seven tokens.
    assert rows_of(cluster.decodes[0]) == (
        decoded[0] + plan.encoder_rows + 7,
        decoded[1] + plan.decoder_rows + 7,
    )
    card = cluster.card
    expected = hit // 128 * card.block_bytes + (card.window_record_bytes if p else 0)
    assert times.load_bytes == expected


@pytest.mark.parametrize("n_tokens", [1, 31, 127, 128, 130])
async def test_a_prompt_too_short_to_gain_runs_on_decode_alone(
    cluster, yardstick, prompt, n_tokens: int
) -> None:
    ids, before = prompt(n_tokens, f"short {n_tokens}"), rows_of(cluster.prefill)
    call = await cluster.local(cluster.request(ids))
    assert await call.result() == await yardstick.text(ids, 8)
    assert rows_of(cluster.prefill) == before
    assert (call.times.start_kind, call.times.hit_tokens) == ("cold", 0)
    assert call.times.encoder_rows == n_tokens
    await cluster.at_rest()


async def test_the_second_turn_loads_and_replays_and_prefills_nothing(
    cluster, yardstick, prompt
) -> None:
    keep, first = cluster.keep_tokens, prompt(700, "conversation")
    one = await cluster.handoff(cluster.request(first, 70))
    answer = await one.result()
    assert answer == await yardstick.text(first, 70)
    await cluster.at_rest()
    await cluster.written()

    hit = floor_grain(700 + 70 - 1)  # the newest token of the first turn has no KV
    assert hit == 768
    # A short question starts from the record that the prompt's rows made, a long one from the
    # record that was made while decoding.
    for n_question, window in ((40, 640), (200, 768)):
        second = [*first, *answer, *prompt(n_question, "next question")]
        n_tokens = len(second)
        assert window == floor_grain(min(hit, n_tokens - keep))
        before = [rows_of(r) for r in (cluster.prefill, *cluster.decodes)]
        two = await cluster.local(cluster.request(second, 5), decode=1)
        assert await two.result() == await yardstick.text(second, 5)
        await cluster.at_rest()
        times = two.times
        assert (times.hit_tokens, times.start_kind) == (hit, StartKind.WINDOW)
        assert times.window_position == window
        assert times.encoder_rows == n_tokens - window <= max(n_tokens - hit, keep + 127)
        assert times.decoder_rows == keep
        after = [rows_of(r) for r in (cluster.prefill, *cluster.decodes)]
        assert after[:2] == before[:2]  # no row on prefill, none on the other decode
        ran = (after[2][0] - before[2][0], after[2][1] - before[2][1])
        assert ran == (times.encoder_rows + 4, keep + 4)


async def test_a_second_turn_on_the_same_replica_loads_no_block(cluster, yardstick, prompt) -> None:
    first = prompt(400, "resident")
    one = await cluster.local(cluster.request(first, 30))
    second = [*first, *await one.result(), *prompt(20, "more")]
    await cluster.at_rest()
    await cluster.written()
    two = await cluster.local(cluster.request(second, 5))
    assert await two.result() == await yardstick.text(second, 5)
    assert two.times.hit_tokens == 384
    assert two.times.load_bytes == cluster.card.window_record_bytes
    await cluster.at_rest()


@pytest.mark.parametrize("n_tokens", [512, 700])
async def test_what_is_stored_is_handed_over_without_a_row(
    cluster, yardstick, prompt, n_tokens: int
) -> None:
    ids = prompt(n_tokens, f"stored {n_tokens}")
    one = await cluster.handoff(cluster.request(ids), decode=0)
    text = await one.result()
    await cluster.at_rest()
    before = rows_of(cluster.prefill)
    two = await cluster.handoff(cluster.request(ids), decode=1)
    assert await two.result() == text == await yardstick.text(ids, 8)
    assert two.prefilled.encoder_rows == 0
    assert two.prefilled.hit_tokens == floor_grain(n_tokens)
    assert rows_of(cluster.prefill) == before
    times = two.times
    assert (times.hit_tokens, times.encoder_rows) == (one.times.hit_tokens, one.times.encoder_rows)
    await cluster.at_rest()


async def test_a_longer_prompt_runs_only_what_is_new_on_prefill(cluster, yardstick, prompt) -> None:
    head = prompt(600, "head")
    await (await cluster.local(cluster.request(head))).result()
    await cluster.at_rest()
    await cluster.written()
    ids = [*head, *prompt(500, "tail")]
    call = await cluster.handoff(cluster.request(ids), decode=1)
    assert await call.result() == await yardstick.text(ids, 8)
    # Decode made a record at 512 = floor(600 - keep) and blocks up to 512.
    assert call.prefilled.hit_tokens == 512
    assert call.prefilled.encoder_rows == floor_grain(1100) - 512
    await cluster.at_rest()


async def test_a_missing_window_record_costs_rows_and_not_the_text(
    cluster, yardstick, prompt
) -> None:
    ids, keep = prompt(640, "no window"), cluster.keep_tokens
    one = await cluster.handoff(cluster.request(ids), decode=0)
    text = await one.result()
    await cluster.at_rest()
    await cluster.written()
    digests = cluster.request(ids).digests
    stored = [p for p in range(128, 641, 128) if await has_window(cluster, digests[p // 128 - 1])]
    assert 512 in stored
    for position in stored:
        await cluster.damage(Kind.SWA, digests[position // 128 - 1])
    work = cluster.decodes[1].work
    damaged = work.counts.damaged
    two = await cluster.local(cluster.request(ids), decode=1)
    assert await two.result() == text == await yardstick.text(ids, 8)
    plan = plan_decode(640, 640, keep, (), yardstick.geometry)
    assert plan.kind is StartKind.REPLAY
    assert two.times.start_kind == StartKind.REPLAY
    assert two.times.encoder_rows == plan.encoder_rows > one.times.encoder_rows
    assert work.counts.damaged > damaged
    await cluster.at_rest()


async def has_window(cluster, digest) -> bool:
    return await cluster.prefill.store.open_windows([(0, digest)], None) is not None


async def test_a_flipped_bit_in_a_stored_block_shortens_the_hit(cluster, yardstick, prompt) -> None:
    ids = prompt(640, "flipped")
    request = cluster.request(ids)
    text = await (await cluster.handoff(request, decode=0)).result()
    await cluster.at_rest()
    await cluster.damage(Kind.KV, request.digests[2])
    work = cluster.decodes[1].work
    damaged, stat = work.counts.damaged, await cluster.prefill.store.stat()
    call = await cluster.local(cluster.request(ids), decode=1)
    assert await call.result() == text == await yardstick.text(ids, 8)
    assert call.times.hit_tokens == 256
    assert call.times.encoder_rows >= 640 - 256
    assert work.counts.damaged == damaged + 1
    await cluster.at_rest()
    after = await cluster.prefill.store.stat()
    assert after.damaged == stat.damaged + 1
    # What was computed anew is good for the next one.
    await cluster.written()
    assert len(await cluster.prefill.store.open_prefix(request.digests, None)) == 5


async def test_a_block_flipped_on_the_way_is_seen_and_computed(cluster, yardstick, prompt) -> None:
    ids = prompt(160, "block flipped on the way")  # one block, and a start before any record
    faults.arm("decode.load=flip@1")
    work = cluster.decodes[0].work
    damaged = work.counts.damaged
    call = await cluster.handoff(cluster.request(ids))
    assert await call.result() == await yardstick.text(ids, 8)
    assert faults.fired("decode.load") == 1
    assert work.counts.damaged == damaged + 1
    assert (call.prefilled.encoder_rows, call.times.hit_tokens) == (128, 0)
    await cluster.at_rest()


async def test_a_record_flipped_on_the_way_is_seen_and_read_again(
    cluster, yardstick, prompt
) -> None:
    """The store's own copy is sound, so nothing is lost by it."""
    ids = prompt(640, "record flipped on the way")
    await (await cluster.handoff(cluster.request(ids))).result()
    await cluster.at_rest()
    faults.arm("decode.load=flip@1")  # the blocks are resident: the record is all that is read
    work = cluster.decodes[0].work
    damaged = work.counts.damaged
    call = await cluster.handoff(cluster.request(ids))
    assert await call.result() == await yardstick.text(ids, 8)
    assert faults.fired("decode.load") == 1
    assert work.counts.damaged == damaged + 1
    assert (call.times.hit_tokens, call.times.window_position) == (640, 512)
    assert call.times.load_bytes == cluster.card.window_record_bytes
    await cluster.at_rest()


async def test_damage_under_a_prefill_is_computed_and_announced_anew(
    cluster, yardstick, prompt
) -> None:
    head = prompt(640, "head of a damaged one")
    await (await cluster.local(cluster.request(head), decode=0)).result()
    await cluster.at_rest()
    await cluster.written()
    ids = [*head, *prompt(360, "its tail")]
    request = cluster.request(ids)
    await cluster.damage(Kind.KV, request.digests[3])
    damaged = cluster.prefill.work.counts.damaged
    call = await cluster.handoff(request, decode=1)
    assert await call.result() == await yardstick.text(ids, 8)
    assert cluster.prefill.work.counts.damaged == damaged + 1
    assert call.prefilled.hit_tokens == 384  # three good blocks
    assert call.times.hit_tokens == floor_grain(1000)  # the fourth came a second time
    await cluster.at_rest()


async def test_domains_share_nothing_and_one_domain_shares_all(cluster, yardstick, prompt) -> None:
    ids = prompt(900, "tenants")
    text = await yardstick.text(ids, 8)
    for decode, domain, hit in ((0, "tenant-a", 0), (1, "tenant-b", 0), (1, "tenant-a", 896)):
        call = await cluster.handoff(cluster.request(ids, domain=domain), decode=decode)
        assert await call.result() == text
        assert call.prefilled.hit_tokens == hit, (domain, decode)
        assert call.prefilled.encoder_rows == (0 if hit else 896)
        await cluster.at_rest()
    # The same on decode alone, where blocks may be resident: still nothing of another domain.
    call = await cluster.local(cluster.request(ids, domain="tenant-c"), decode=1)
    assert await call.result() == text
    assert call.times.hit_tokens == 0
    await cluster.at_rest()


async def test_many_at_once_wait_for_room_and_each_gets_its_own_text(
    cluster, yardstick, prompt
) -> None:
    prompts = [prompt(180 + 37 * i, f"crowd {i}") for i in range(6)]
    calls = [
        await (cluster.handoff if i % 2 else cluster.local)(cluster.request(ids, 6))
        for i, ids in enumerate(prompts)
    ]
    for call, ids in zip(calls, prompts, strict=True):
        assert await call.result() == await yardstick.text(ids, 6)
    # Tokens of several sequences left in one frame.
    assert max(len(frame.items) for frame in cluster.router.frames) > 1
    await cluster.at_rest()
    loads = cluster.router.loads
    async with asyncio.timeout(10.0):
        while any(holds(load) for load in loads.values()):
            await asyncio.sleep(0.01)
    assert loads.keys() == {"prefill-0", "decode-0", "decode-1"}
    assert all(load.rows_per_s > 0 for load in loads.values())


def holds(load) -> bool:
    held = (load.waiting_requests, load.running_requests, load.held_leases, load.backlog_rows)
    return held != (0, 0, 0, 0)


async def test_a_stop_id_ends_the_text_and_is_no_part_of_it(cluster, yardstick, prompt) -> None:
    ids = prompt(200, "stop")
    text = await yardstick.text(ids, 12)
    stop = text[5]
    call = await cluster.handoff(cluster.request(ids, 12, stop=(stop,)))
    assert await call.result() == text[: text.index(stop)]
    assert call.finish is FinishReason.STOP
    await cluster.at_rest()


async def test_frames_may_overtake_their_job(cluster, yardstick, prompt) -> None:
    ids = prompt(500, "overtaken")
    call = await cluster.handoff(cluster.request(ids), decode_first=False)
    await asyncio.sleep(0)
    assert await call.result() == await yardstick.text(ids, 8)
    assert call.times.hit_tokens == 384
    assert len(cluster.decodes[0].work.early) == 0
    await cluster.at_rest()


async def test_an_attempt_goes_on_from_tokens_that_a_former_one_generated(
    cluster, yardstick, prompt
) -> None:
    ids = prompt(500, "resumed")
    text = await yardstick.text(ids, 24)
    one = await cluster.local(cluster.request(ids, 16), decode=0)
    assert await one.result() == text[:16]
    await cluster.at_rest()
    await cluster.written()
    two = await cluster.local(cluster.request(ids, 24, epoch=1), decode=1, generated=text[:16])
    assert await two.result() == text[16:]
    plan = plan_resume(516, 512, 500 - cluster.keep_tokens, (384, 512), yardstick.geometry)
    assert two.times.hit_tokens == 512
    assert (two.times.encoder_rows, two.times.decoder_rows) == (
        plan.encoder_rows,
        plan.decoder_rows,
    )
    await cluster.at_rest()


async def test_a_prefill_that_finds_no_room_stops_and_decode_computes_the_rest(
    cluster, yardstick, prompt
) -> None:
    ids = prompt(900, "cut short")
    faults.arm("prefill.seal=drop@3")
    call = await cluster.handoff(cluster.request(ids))
    assert await call.result() == await yardstick.text(ids, 8)
    assert faults.fired("prefill.seal") == 1
    assert cluster.prefill.work.counts.cut_short == 1
    assert 0 < call.times.hit_tokens < floor_grain(900)
    assert call.times.encoder_rows >= 900 - call.times.hit_tokens
    await cluster.at_rest()


async def test_digests_name_what_the_store_holds(cluster, prompt) -> None:
    """The blocks that a hand-off sealed and those that decode completed are one chain."""
    ids = prompt(380, "chain")
    request = cluster.request(ids, 10)
    answer = await (await cluster.handoff(request)).result()
    await cluster.at_rest()
    await cluster.written()
    known = cluster.request([*ids, *answer]).digests
    assert known[:2] == request.digests == block_digests(request.chain_root, request.token_ids)
    assert len(await cluster.prefill.store.open_prefix(known, None)) == 389 // 128 == 3
