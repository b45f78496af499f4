"""A request that is given up at any stage leaves nothing behind soon after: no job, no engine
block or slot, no lease. Others beside it go on."""

from __future__ import annotations

import asyncio
import contextlib

import pytest
import pytest_asyncio

from headrace.core import faults
from headrace.core.card import Role
from headrace.core.chain import as_token_ids
from headrace.core.ids import BootId
from headrace.core.limits import WireLimits
from headrace.core.messages import BlocksReady, Drain, Hello, PrefillDone
from headrace.core.peers import introduce
from headrace.decode.handoff import DecodeState
from headrace.engine import Job as EngineJob
from headrace.prefill.jobs import JobState

MODEL = "toy"
pytestmark = pytest.mark.asyncio(loop_scope="module")

ENGINE_SLOTS = 4
SOON_S = 2.5  # as `at_rest` of the cluster: before any lease runs out
LONG = 1500  # tokens of a prompt: a dozen steps of 128 rows
ENDLESS = 400  # tokens of an answer that nobody waits for


async def until(condition, within_s: float = 60.0) -> None:
    async with asyncio.timeout(within_s):
        while not condition():
            await asyncio.sleep(0.002)


def state_of(replica, call):
    """Of the call's job there, whichever end of it the replica has."""
    jobs = replica.work.jobs
    job = jobs.get(call.key) or jobs.get(call.prefill_key)
    return job.state if job else None


@pytest.fixture(params=["cancel", "router leaves"])
def give_up(request: pytest.FixtureRequest, cluster):
    """Two ways to give a call up: a Cancel to both roles, or the end of the router's links."""

    async def cancel(call, router) -> None:
        await router.cancel(call)

    async def leave(call, router) -> None:
        await router.close()

    return cancel if request.param == "cancel" else leave


@pytest_asyncio.fixture(loop_scope="module")
async def router(new_router):
    """A second router, so that a test can let it go."""
    return await new_router("router-1")


@contextlib.asynccontextmanager
async def full(cluster, replica, prompt, slots=ENGINE_SLOTS, max_tokens=8):
    """An engine with `slots` taken: these sequences are admitted and never started."""
    keys = []
    for number in range(slots):
        request = cluster.request(prompt(40, f"dummy {number}"), max_tokens)
        job = EngineJob(request, as_token_ids(()), 0)
        assert await replica.driver.call(replica.engine.admit, job) is not None
        keys.append(request.key)
    yield
    for key in keys:
        await replica.driver.call(replica.engine.release, key)


async def test_in_line_for_decode(cluster, prompt, router, give_up) -> None:
    decode = cluster.decodes[0]
    async with full(cluster, decode, prompt):
        waits = await cluster.handoff(cluster.request(prompt(300, "waits")), router=router)
        await until(lambda: state_of(decode, waits) is DecodeState.QUEUED_TOLD)
        await give_up(waits, router)
        await until(lambda: waits.key not in decode.work.jobs, SOON_S)
    await cluster.at_rest()


async def test_in_line_for_prefill(cluster, prompt, router, give_up) -> None:
    """The one that goes stands before another, which must get its turn."""
    prefill = cluster.prefill
    async with full(cluster, prefill, prompt):
        ids = prompt(300, f"goes {give_up.__name__}")
        waits = await cluster.handoff(cluster.request(ids), router=router)
        await until(lambda: state_of(prefill, waits) is JobState.WAITING)
        ids = prompt(300, f"stays {give_up.__name__}")
        stays = await cluster.handoff(cluster.request(ids))
        await until(lambda: state_of(prefill, stays) is JobState.WAITING)
        await give_up(waits, router)
        await until(lambda: state_of(prefill, waits) is None, SOON_S)
        assert state_of(prefill, stays) is JobState.WAITING
    prefill.work._room.set()  # what the release of a job does
    assert len(await stays.result()) == 8
    await cluster.at_rest()


async def test_in_line_nobody_overtakes_one_that_finds_no_room(cluster, yardstick, prompt) -> None:
    """Three sequences hold 48 of 60 blocks: a long request does not fit, a short one would."""
    decode, ids = cluster.decodes[0], prompt(20, "small and second")
    async with full(cluster, decode, prompt, slots=3, max_tokens=2000):
        big = await cluster.local(cluster.request(prompt(1900, "big and first"), 100))
        await until(lambda: state_of(decode, big) is DecodeState.QUEUED_TOLD)
        small = await cluster.local(cluster.request(ids))
        await asyncio.sleep(0.3)
        assert state_of(decode, small) is DecodeState.QUEUED_TOLD
        assert (decode.driver.stats.free_blocks, decode.driver.stats.free_slots) == (12, 1)
        await cluster.router.cancel(big)
        assert await small.result() == await yardstick.text(ids, 8)
    await cluster.at_rest()


async def test_in_the_middle_of_a_prefill(cluster, prompt, router, give_up) -> None:
    before = cluster.prefill.driver.stats.encoder_rows_total
    call = await cluster.handoff(cluster.request(prompt(LONG, "mid")), router=router)
    await until(lambda: cluster.prefill.driver.stats.encoder_rows_total >= before + 256)
    assert state_of(cluster.prefill, call) is JobState.RUNNING
    await give_up(call, router)
    await cluster.at_rest()
    ran = cluster.prefill.driver.stats.encoder_rows_total - before
    assert 256 <= ran < LONG - 128, "the cancel came after all rows"
    assert not call.token_ids


async def test_while_decode_awaits_a_prefill_that_never_speaks(
    cluster, prompt, router, give_up
) -> None:
    call = await router.send(
        cluster.request(prompt(700, "mute")), router.to["decode-0"], prefill_name="prefill-9"
    )
    decode = cluster.decodes[0]
    await until(lambda: state_of(decode, call) is DecodeState.AWAITING)
    assert decode.driver.stats.held_blocks == 6  # all of 700 + 8 tokens, at once
    await give_up(call, router)
    await cluster.at_rest()


async def test_while_blocks_are_loaded(cluster, prompt, router, give_up) -> None:
    """The copying thread sleeps five seconds; the job does not wait for it, and no test after this
    does: it is the second replica's."""
    ids = prompt(700, "load")
    await (await cluster.handoff(cluster.request(ids))).result()
    await cluster.at_rest()
    faults.arm("decode.load=sleep@2")
    call = await cluster.handoff(cluster.request(ids), decode=1, router=router)
    await until(lambda: faults.fired("decode.load") == 1)
    await until(lambda: state_of(cluster.decodes[1], call) is DecodeState.LOADING)
    await give_up(call, router)
    await cluster.at_rest()
    assert not call.token_ids


@pytest.mark.parametrize("tokens", [1, 20])
async def test_in_the_middle_of_an_answer(cluster, prompt, router, give_up, tokens: int) -> None:
    call = await cluster.handoff(cluster.request(prompt(300, "talk"), ENDLESS), router=router)
    await until(lambda: len(call.token_ids) >= tokens)
    await give_up(call, router)
    await cluster.at_rest()
    assert len(call.token_ids) < ENDLESS


async def test_a_deadline_ends_a_request_in_prefill_and_in_decode(cluster, prompt) -> None:
    call = await cluster.handoff(cluster.request(prompt(LONG, "late"), deadline_s=0.05))
    failed = await call.failure()
    assert (failed.code, failed.retryable) == ("deadline_exceeded", False)
    await cluster.at_rest()
    call = await cluster.local(cluster.request(prompt(50, "slow"), ENDLESS, deadline_s=0.5))
    failed = await call.failure()
    assert (failed.code, failed.retryable) == ("deadline_exceeded", False)
    await cluster.at_rest()


async def test_what_can_never_fit_is_refused_at_once(cluster, prompt) -> None:
    call = await cluster.local(cluster.request(prompt(1990, "big"), 100))  # 2,048 positions
    failed = await call.failure()
    assert (failed.code, failed.retryable) == ("limit_exceeded", False)
    assert "2048" in failed.message and "2090" in failed.message
    await cluster.at_rest()


async def test_a_handoff_without_progress_is_given_up_while_others_keep_what_they_have(
    cluster, yardstick, prompt
) -> None:
    """Three that last longer than a lease: a prefill never speaks to one, one stands in line at
    prefill, which is progress, and one decodes and keeps its record."""
    runs = await cluster.handoff(cluster.request(prompt(700, "long answer"), ENDLESS))
    await asyncio.wait_for(runs.begun.wait(), 60)
    ids = prompt(700, "waits long")
    async with full(cluster, cluster.prefill, prompt):
        waits = await cluster.handoff(cluster.request(ids), decode=1, bind="early")
        await until(lambda: state_of(cluster.decodes[1], waits) is DecodeState.AWAITING)
        mute = cluster.request(prompt(700, "stalled"))
        call = await cluster.router.send(mute, cluster.to_decode[1], prefill_name="prefill-9")
        failed = await call.failure(within_s=10)
        assert (failed.code, failed.retryable) == ("replica_lost", True)
        assert "no progress of the hand-off for 4" in failed.message
        assert state_of(cluster.decodes[1], waits) is DecodeState.AWAITING
        stat = await cluster.prefill.store.stat()
        if not runs.ended.is_set():
            # The window record alone: the blocks' part ended when they were loaded.
            assert (stat.leases, stat.leased_objects) == (1, 1)
    cluster.prefill.work._room.set()
    assert await waits.result() == await yardstick.text(ids, 8)
    await cluster.router.cancel(runs)
    await cluster.at_rest()


# ---- late, duplicate and foreign frames --------------------------------------------------------


async def test_jobs_and_announcements_that_come_twice_run_once(cluster, yardstick, prompt) -> None:
    ids = prompt(700, "twice")
    await (await cluster.handoff(cluster.request(prompt(200, "link")))).result()  # the link stands
    await cluster.at_rest()
    works = (cluster.prefill.work, cluster.decodes[0].work)
    jobs = [work.counts.jobs for work in works]
    late = [work.counts.late for work in works]
    before = cluster.prefill.driver.stats.encoder_rows_total
    faults.arm("link.send=duplicate")  # every frame that this process sends
    call = await cluster.handoff(cluster.request(ids), bind="early")
    assert await call.result() == await yardstick.text(ids, 8)
    assert faults.fired("link.send") >= 5
    faults.disarm()
    await cluster.at_rest()
    assert [work.counts.jobs for work in works] == [n + 1 for n in jobs]
    assert works[0].counts.late == late[0] + 2  # the job and the bind
    # The job, five blocks, the window record and PrefillDone.
    assert works[1].counts.late >= late[1] + 3
    assert cluster.prefill.driver.stats.encoder_rows_total == before + 640
    assert call.times.hit_tokens == 640


async def test_an_older_epoch_is_ignored_and_a_newer_one_takes_over(
    cluster, yardstick, prompt
) -> None:
    ids = prompt(700, "epochs")
    decode = cluster.decodes[0]
    old = await cluster.handoff(cluster.request(ids, ENDLESS, epoch=1))
    await asyncio.wait_for(old.begun.wait(), 60)
    seen = len(old.token_ids)
    new = await cluster.handoff(cluster.request(ids, epoch=2, request_id=old.key.request_id))
    assert await new.result() == await yardstick.text(ids, 8)
    assert not old.failures and old.finish is None
    assert len(old.token_ids) < ENDLESS and len(old.token_ids) >= seen
    late = (cluster.prefill.work.counts.late, decode.work.counts.late)
    older = await cluster.handoff(cluster.request(ids, epoch=0, request_id=old.key.request_id))
    await cluster.router.cancel(older)
    await until(lambda: cluster.prefill.work.counts.late == late[0] + 2)
    await until(lambda: decode.work.counts.late == late[1] + 1)  # nobody asked for decode
    await cluster.at_rest()
    assert not older.token_ids and not older.failures


async def test_announcements_of_others_are_late_foreign_or_held(cluster, prompt) -> None:
    decode = cluster.decodes[0]
    card = cluster.card
    hello = Hello(Role.PREFILL, "prefill-7", BootId("x"), "test", card)
    peer = await introduce(decode.shell.address, hello, cluster.prefill.role.token, WireLimits())
    counts = decode.work.counts
    request = cluster.request(prompt(300, "foreign"), ENDLESS)
    key = request.key
    # Before the job: held, then taken by it.
    await peer.link.send(PrefillDone(key, 0, 0, 0.0))
    await until(lambda: len(decode.work.early) == 1)
    call = await cluster.router.send(request, cluster.to_decode[0], prefill_name="prefill-7")
    await asyncio.wait_for(call.begun.wait(), 60)
    assert len(decode.work.early) == 0
    # While it runs: late.
    late = counts.late
    await peer.link.send(BlocksReady(key, 0, (), ()))
    await until(lambda: counts.late == late + 1)
    await cluster.router.cancel(call)
    await cluster.at_rest()
    # After its end: late again, not held for ever.
    late = counts.late
    await peer.link.send(BlocksReady(key, 0, (), ()))
    await until(lambda: counts.late == late + 1)
    assert len(decode.work.early) == 0
    # For a live job, but with digests of another text.
    waits = cluster.request(prompt(300, "waits for blocks"))
    call = await cluster.router.send(waits, cluster.to_decode[0], prefill_name="prefill-7")
    await until(lambda: state_of(decode, call) is DecodeState.AWAITING)
    foreign = counts.foreign
    (place, *_) = await cluster.prefill.store.open_prefix(request.digests, None) or (None,)
    place = place or await some_place(cluster, prompt)
    await peer.link.send(BlocksReady(call.key, 0, request.digests[:1], (place,)))
    await until(lambda: counts.foreign == foreign + 1)
    # Its end before all was told is a retryable failure of the job.
    peer.link.abort()
    failed = await call.failure()
    assert (failed.code, failed.retryable) == ("replica_lost", True)
    await cluster.at_rest()


async def some_place(cluster, prompt):
    request = cluster.request(prompt(300, "foreign"))
    await (await cluster.local(request, decode=1)).result()
    await cluster.at_rest()
    await cluster.written()
    return (await cluster.prefill.store.open_prefix(request.digests, None))[0]


# ---- pairing and drain -------------------------------------------------------------------------


async def test_a_decode_of_another_model_is_refused_with_a_reason(
    cluster, prompt, new_decode
) -> None:
    other = await new_decode("decode-8", seed=1)
    to_other = await cluster.router.connect(other.shell.address)
    call = await cluster.router.send(
        cluster.request(prompt(700, "pair")),
        to_other,
        cluster.to_prefill,
        decode_address=other.shell.address,
    )
    failed = await call.failure()
    assert (failed.code, failed.retryable) == ("config_error", False)
    assert "namespace" in failed.message and "decode-8" in failed.message
    await cluster.router.cancel(call)
    await cluster.at_rest()


async def test_a_drain_finishes_what_runs_and_takes_nothing_new(
    cluster, yardstick, prompt, new_decode
) -> None:
    other = await new_decode("decode-9")
    to_other = await cluster.router.connect(other.shell.address)
    ids = prompt(200, "drained")
    runs = await cluster.router.send(cluster.request(ids, 30), to_other)
    await asyncio.wait_for(runs.begun.wait(), 60)
    await to_other.link.send(Drain(grace_s=20))
    await until(lambda: other.member().state == "draining")
    refused = await cluster.router.send(cluster.request(ids), to_other)
    failed = await refused.failure()
    assert (failed.code, failed.retryable) == ("no_replica", True)
    served = asyncio.create_task(other.run())
    assert await runs.result() == await yardstick.text(ids, 30)
    await asyncio.wait_for(served, 5)


async def test_what_fails_in_the_engine_is_one_explicit_failure(cluster, yardstick, prompt) -> None:
    ids = prompt(60, "fails")  # one step, with the logits that become NaN
    faults.arm("engine.step=nan@1")
    failed = await (await cluster.local(cluster.request(ids))).failure()
    assert faults.fired("engine.step") == 1
    assert (failed.code, failed.retryable) == ("not_a_number", False)
    await cluster.at_rest()
    again = await cluster.local(cluster.request(ids))
    assert await again.result() == await yardstick.text(ids, 8)
    await cluster.at_rest()


@pytest.mark.parametrize(
    "point",
    [
        *("prefill.chunk", "prefill.seal", "prefill.announce"),
        *("decode.accept", "decode.first_token", "decode.token"),
    ],
)
async def test_a_failure_at_any_point_is_told_once_and_may_be_retried(
    cluster, yardstick, prompt, point: str
) -> None:
    ids = prompt(300, f"fault at {point}")
    faults.arm(f"{point}=raise@1")
    request = cluster.request(ids)
    call = await cluster.handoff(request)
    failed = await call.failure()
    assert faults.fired(point) == 1
    assert (failed.code, failed.retryable) == ("injected_fault", True)
    await cluster.router.cancel(call)  # as a router does with the other half
    await cluster.at_rest()
    again = await cluster.handoff(
        cluster.request(ids, epoch=1, request_id=request.request_id), decode=1
    )
    assert await again.result() == await yardstick.text(ids, 8)
    await cluster.at_rest()


async def test_a_load_that_fails_is_computed(cluster, yardstick, prompt) -> None:
    ids = prompt(160, "load fails")  # one block and no record, which may be read before it
    faults.arm("decode.load=raise@1")
    call = await cluster.handoff(cluster.request(ids))
    assert await call.result() == await yardstick.text(ids, 8)
    assert faults.fired("decode.load") == 1
    assert (call.prefilled.encoder_rows, call.times.hit_tokens) == (128, 0)
    await cluster.at_rest()
