"""What the index did not have a moment ago is not asked for again at once."""

from __future__ import annotations

from headrace.core.clock import FakeClock
from headrace.kvstore.absent import AbsentKeys


def test_a_key_is_absent_for_its_time():
    clock = FakeClock()
    keys = AbsentKeys(clock, 0.5, 10)
    keys.add(b"a")
    clock.advance(0.4)
    keys.add(b"b")
    assert b"a" in keys and b"b" in keys and b"c" not in keys
    clock.advance(0.2)
    assert b"a" not in keys and b"b" in keys and len(keys) == 1
    keys.discard(b"b")
    assert b"b" not in keys
    keys.add(b"a")
    clock.advance(0.4)
    keys.add(b"a")  # absent again: its time begins anew
    clock.advance(0.4)
    assert b"a" in keys


def test_the_oldest_goes_when_there_are_too_many():
    clock = FakeClock()
    keys = AbsentKeys(clock, 5.0, 3)
    for number in range(1000):
        keys.add(b"%d" % number)
    assert len(keys) == 3 and b"999" in keys and b"997" in keys and b"996" not in keys


def test_no_time_or_no_room_believes_nothing():
    for keys in (AbsentKeys(FakeClock(), 0.0, 10), AbsentKeys(FakeClock(), 1.0, 0)):
        keys.add(b"a")
        assert b"a" not in keys and len(keys) == 0
