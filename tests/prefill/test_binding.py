"""For whom a product is: the bind's table, which BindDecode counts, in which order it is told."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.core.errors import IllegalTransition
from headrace.core.ids import JobKey, RequestId
from headrace.core.messages import BindDecode, BlocksReady, PrefillDone
from headrace.prefill.binding import BIND_TABLE, BindEvent, Binding, BindState, Product

KEY = JobKey(RequestId("r"), 0)


def named(epoch: int) -> BindDecode:
    return BindDecode(KEY, epoch, f"tcp://127.0.0.1:{epoch}", f"decode-{epoch}")


def test_only_one_that_is_being_reached_can_be_said_to_have_been_reached() -> None:
    for state in BindState:
        if state is BindState.LINKING:
            assert BIND_TABLE.step(state, BindEvent.LINKED).state is BindState.BOUND
        else:
            with pytest.raises(IllegalTransition):
                BIND_TABLE.step(state, BindEvent.LINKED)


def test_a_decode_replica_is_asked_for_once() -> None:
    binding = Binding()
    assert binding.step(BindEvent.NEAR)
    assert not binding.step(BindEvent.NEAR)
    assert binding.state is BindState.ASKED


def test_a_later_epoch_replaces_and_an_older_one_or_the_same_does_not() -> None:
    binding = Binding()
    assert binding.name(named(3)) and binding.decode_key == JobKey(KEY.request_id, 3)
    assert not binding.name(named(3)) and not binding.name(named(1))
    binding.step(BindEvent.LINKED)
    binding.told = True
    assert not binding.name(named(3)) and binding.told
    assert binding.name(named(4)) and not binding.told
    assert binding.state is BindState.LINKING and binding.message == named(4)


def test_after_a_loss_the_same_one_may_be_tried_again() -> None:
    binding = Binding()
    binding.name(named(1))
    assert binding.step(BindEvent.GONE) and binding.state is BindState.ASKED
    assert not binding.step(BindEvent.GONE)
    assert binding.name(named(1)) and binding.state is BindState.LINKING


@given(
    st.lists(st.one_of(st.integers(1, 6), st.sampled_from(["near", "linked", "gone"])), max_size=30)
)
def test_epochs_never_go_back_whatever_comes(events: list[int | str]) -> None:
    binding, newest = Binding(), 0
    for event in events:
        if isinstance(event, int):
            taken = binding.name(named(event))
            assert not taken or event >= newest
            newest = event if taken else newest
        elif event != "linked" or binding.state is BindState.LINKING:
            binding.step(BindEvent(event))
        assert (binding.message.decode_epoch if binding.message else 0) == newest


async def test_whoever_reads_later_reads_everything_in_order() -> None:
    product = Product()
    items = [BlocksReady(KEY, i, (), ()) for i in range(5)]
    for item in items[:3]:
        product.add(item)
    first = [await product.item(i) for i in range(3)]
    waits = asyncio.create_task(product.item(3))
    await asyncio.sleep(0)
    assert not waits.done()
    waits.cancel()  # as a bind that is replaced
    done = PrefillDone(KEY, 1, 0, 0.1)
    for item in (*items[3:], done):
        product.add(item)
    assert [await product.item(i) for i in range(6)] == [*first, *items[3:], done]


@pytest.mark.parametrize("state", BindState)
def test_a_bind_is_taken_in_every_state(state: BindState) -> None:
    binding = Binding(state)
    assert binding.name(named(1)) and binding.state is BindState.LINKING
