"""Which blocks are being computed: the decision, the bound, and the claims."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.core.ids import Digest, JobKey, RequestId
from headrace.prefill.underway import LEAST_WAIT_S, Underway, block_to_await, wait_bound_s

A, B, C = (JobKey(RequestId(name), 0) for name in "abc")


def chain(text: str) -> list[Digest]:
    """Digests as a prompt's blocks have them: equal exactly where all blocks up to there are."""
    return [Digest(text[: i + 1].encode()) for i in range(len(text))]


def test_one_waits_for_the_last_block_that_it_shares() -> None:
    underway = Underway()
    underway.claim(A, chain("xxxx"))
    assert block_to_await(chain("xxyy"), underway.computers) == b"xx"
    assert block_to_await(chain("xxxx"), underway.computers) == b"xxxx"
    assert block_to_await(chain("xx"), underway.computers) == b"xx"
    assert block_to_await(chain("yxxx"), underway.computers) is None
    # What is sealed is no longer waited for, and what is stored before it does not matter.
    underway.sealed(A, chain("xxxx")[:2])
    assert block_to_await(chain("xxyy"), underway.computers) is None
    assert block_to_await(chain("xxxz"), underway.computers) == b"xxx"


def test_behind_one_computer_another_one_is_not_looked_at() -> None:
    underway = Underway()
    underway.claim(A, chain("xx"))
    underway.claim(B, chain("xxyy"))  # after its bound passed: the first two stay A's
    assert [underway.computers[d] for d in chain("xxyy")] == [A, A, B, B]
    assert block_to_await(chain("xxyy"), underway.computers) == b"xx"
    underway.ended(A)
    assert block_to_await(chain("xxyy"), underway.computers) == b"xxyy"


def test_a_claim_is_its_owners_alone() -> None:
    underway = Underway()
    underway.claim(A, chain("xx"))
    underway.sealed(B, chain("xx"))
    underway.ended(B)
    assert set(underway.computers.values()) == {A}
    underway.ended(A)
    underway.ended(A)
    assert not underway.computers


def test_the_bound_is_the_predicted_time_times_the_factor() -> None:
    assert wait_bound_s(6000, 2000.0, 4.0, 30.0) == pytest.approx(12.0)
    assert wait_bound_s(1, 2000.0, 4.0, 30.0) == LEAST_WAIT_S
    assert wait_bound_s(6000, 0.0, 4.0, 30.0) == 30.0  # nothing was measured yet
    assert wait_bound_s(6000, 2000.0, 0.0, 30.0) == 0.0


async def test_a_waiter_goes_on_when_it_is_sealed_when_the_other_ends_and_at_its_bound() -> None:
    for end in ("sealed", "ended", "bound"):
        underway = Underway()
        underway.claim(A, chain("xxx"))
        bound_s = 0.01 if end == "bound" else 30.0
        waits = asyncio.create_task(underway.wait(chain("xx")[-1], bound_s))
        await asyncio.sleep(0)
        underway.sealed(A, chain("x"))
        await asyncio.sleep(0)
        assert not waits.done()
        if end == "sealed":
            underway.sealed(A, chain("xx"))
        elif end == "ended":
            underway.ended(A)
        assert await waits is (end != "bound")
        assert not underway._waiting


async def test_a_waiter_that_is_cancelled_leaves_nothing() -> None:
    underway = Underway()
    underway.claim(A, chain("x"))
    waits = [asyncio.create_task(underway.wait(chain("x")[0], 30.0)) for _ in range(2)]
    await asyncio.sleep(0)
    waits[0].cancel()
    await asyncio.sleep(0)
    assert len(underway._waiting) == 1
    underway.ended(A)
    assert await waits[1]
    assert not underway._waiting and not underway._claims


PROMPTS = st.lists(st.text("xy", min_size=1, max_size=5), min_size=1, max_size=6)


@given(prompts=PROMPTS, fates=st.lists(st.sampled_from(["runs", "fails", "cancelled"]), min_size=6))
async def test_every_job_ends_and_no_block_is_computed_twice_unless_its_computer_failed(
    prompts: list[str], fates: list[str]
) -> None:
    """Jobs as prefill runs them, with a store and an engine of a few lines."""
    underway, stored = Underway(), set[Digest]()
    computed: list[tuple[Digest, JobKey]] = []
    failed: set[JobKey] = set()

    async def job(number: int, prompt: str, fate: str) -> None:
        key, digests = JobKey(RequestId(str(number)), 0), chain(prompt)
        try:
            while (block := block_to_await(digests, underway.computers)) is not None:
                assert underway.computers[block] != key
                assert await underway.wait(block, 60.0)
            underway.claim(key, digests)
            await asyncio.sleep(0)  # opens what is stored
            hit = sum(digest in stored for digest in digests)
            underway.sealed(key, digests[:hit])
            for index in range(hit, len(digests)):
                await asyncio.sleep(0)
                if fate != "runs" and index == hit + 1:
                    failed.add(key)
                    if fate == "cancelled":
                        raise asyncio.CancelledError
                    return
                computed.append((digests[index], key))
                await asyncio.sleep(0)
                stored.add(digests[index])
                underway.sealed(key, digests[index : index + 1])
        finally:
            underway.ended(key)

    tasks = [asyncio.create_task(job(i, prompt, fates[i])) for i, prompt in enumerate(prompts)]
    async with asyncio.timeout(20):
        await asyncio.gather(*tasks, return_exceptions=True)
    digests = [digest for digest, key in computed if key not in failed]
    assert len(digests) == len(set(digests))
    assert not underway.computers and not underway._waiting and not underway._claims
