"""What an engine takes in: reservations, fills that are missing, and what it refuses."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from headrace.core.chain import as_token_ids
from headrace.core.errors import ConfigError, InvalidRequest, Overloaded
from headrace.core.request import GenRequest
from headrace.core.rows import Geometry, plan_decode, plan_prefill
from headrace.engine import EngineSettings, Half, Job
from headrace.engine.plan import StepResult
from headrace.engine.scheduler import Scheduler

NewScheduler = Callable[..., Scheduler]
NewRequest = Callable[..., GenRequest]
Answer = Callable[..., StepResult]
T1 = Geometry(32, 6, 6)
NO_IDS = as_token_ids([])


def test_admission_reserves_everything_or_waits(
    new_scheduler: NewScheduler, new_request: NewRequest
) -> None:
    scheduler = new_scheduler(n_blocks=5, n_slots=2)
    first = new_request(129, name="a", max_tokens=128)  # 257 positions: 3 blocks
    assert scheduler.admit(Job(first, NO_IDS, 0)) is not None
    assert scheduler.resources.blocks.n_available == 2
    second = new_request(129, name="b", max_tokens=128)
    assert scheduler.admit(Job(second, NO_IDS, 0)) is None
    assert scheduler.resources.blocks.n_available == 2
    assert scheduler.resources.slots.n_free == 1
    scheduler.release(first.key)
    assert scheduler.admit(Job(second, NO_IDS, 0)) is not None
    encoder = new_scheduler(Half.ENCODER, n_blocks=5, n_slots=2)
    assert encoder.admit(Job(new_request(300, max_tokens=4096), NO_IDS, 0)) is not None
    assert encoder.resources.blocks.n_available == 3  # floor(300) = two blocks


def test_admission_names_fills_that_are_not_resident(
    new_scheduler: NewScheduler, new_request: NewRequest
) -> None:
    scheduler = new_scheduler()
    request = new_request(300)
    admission = scheduler.admit(Job(request, NO_IDS, 2))
    assert admission is not None
    assert [(f.index, f.digest) for f in admission.fills] == list(enumerate(request.digests))
    plan = plan_decode(300, 256, 44, (), T1)
    guard = scheduler.resources.guard
    with pytest.raises(ValueError, match="block 0 of the hit was not filled"):
        scheduler.start(request.key, plan)
    first, second = admission.fills
    assert guard.enter(first.ticket, first.block)
    with pytest.raises(ValueError, match="while a fill is in flight"):
        scheduler.start(request.key, plan)
    guard.leave(first.ticket, first.block, complete=True)
    assert guard.enter(second.ticket, second.block)
    guard.leave(second.ticket, second.block, complete=False)
    with pytest.raises(ValueError, match="block 1 of the hit was not filled"):
        scheduler.start(request.key, plan)
    # The damaged fill shortens the hit: block 1 is computed here.
    assert scheduler.start(request.key, plan_decode(300, 128, 44, (), T1)) is not None
    assert scheduler.resources.blocks.resident_prefix(request.digests) == 1
    assert not guard.enter(second.ticket, second.block)  # the ticket ended with the start


def test_a_hit_below_the_resident_prefix_needs_own_blocks(
    new_scheduler: NewScheduler, new_request: NewRequest, answer: Answer
) -> None:
    scheduler = new_scheduler(n_blocks=4)
    donor = new_request(256, name="donor", max_tokens=1)
    assert scheduler.admit(Job(donor, NO_IDS, 0)) is not None
    scheduler.start(donor.key, plan_decode(256, 0, 44, (), T1))
    plan = scheduler.plan()
    assert plan is not None
    while plan is not None:
        scheduler.advance(answer(plan))
        plan = scheduler.plan()
    request = new_request(256, max_tokens=1)
    assert scheduler.admit(Job(request, NO_IDS, 2)) is not None
    lease = next(s.lease for s in scheduler.sequences() if s.key == request.key)
    with pytest.raises(Overloaded):
        scheduler.start(request.key, plan_decode(256, 0, 44, (), T1))
    assert lease.n_shared == 2
    shared = list(lease.blocks)
    scheduler.release(donor.key)
    assert scheduler.start(request.key, plan_decode(256, 128, 44, (), T1)) is not None
    assert lease.n_shared == 1
    assert lease.blocks[0] == shared[0] and lease.blocks[1] not in shared


@pytest.mark.parametrize(
    ("change", "param", "message"),
    [
        ({"prompt": [5, 4096]}, "prompt", "below 4096, got 4096"),
        ({"prompt": 4000, "max_tokens": 97}, "max_tokens", "4096 tokens, got 4097"),
        ({"prompt": 10, "max_tokens": 640}, "max_tokens", "5 blocks of 128 tokens here, got 6"),
    ],
)
def test_what_can_never_fit_is_refused_at_once(
    new_scheduler: NewScheduler,
    new_request: NewRequest,
    change: dict[str, object],
    param: str,
    message: str,
) -> None:
    scheduler = new_scheduler(n_blocks=5)
    request = new_request(change.pop("prompt"), **change)
    with pytest.raises(InvalidRequest, match=message) as caught:
        scheduler.admit(Job(request, NO_IDS, 0))
    assert caught.value.param == param
    assert scheduler.resources.blocks.n_available == 5


def test_mistakes_of_the_owner_are_refused(
    new_scheduler: NewScheduler, new_request: NewRequest
) -> None:
    scheduler = new_scheduler()
    request = new_request(300)
    with pytest.raises(ValueError, match="a hit of 3 blocks in 300 tokens"):
        scheduler.admit(Job(request, NO_IDS, 3))
    with pytest.raises(InvalidRequest, match="4 of 4 tokens"):
        scheduler.admit(Job(request, as_token_ids([1, 2, 3, 4]), 0))
    assert scheduler.admit(Job(request, NO_IDS, 1)) is not None
    with pytest.raises(ValueError, match="already admitted"):
        scheduler.admit(Job(request, NO_IDS, 1))
    for plan in (
        plan_decode(299, 128, 44, (), T1),
        plan_prefill(300, 128, 44, (), T1),
        plan_decode(300, 256, 44, (), T1),
    ):
        with pytest.raises(ValueError, match="do not fit|write floor 256 with 1 blocks"):
            scheduler.start(request.key, plan)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"n_blocks": 0}, "n_blocks must be an integer between 1 and"),
        ({"n_slots": True}, "n_slots must be an integer"),
        ({"max_rows_per_step": 3, "n_slots": 4}, r"at least n_slots \(4\).* got 3"),
        ({"max_waiting": -1}, "max_waiting must be .* got -1"),
    ],
)
def test_settings_name_key_bound_and_value(values: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EngineSettings(**values)
