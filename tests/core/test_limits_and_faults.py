"""Limits say bound and value; clocks move when told; fault points fire where armed and count."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from headrace.core import faults
from headrace.core.clock import FakeClock
from headrace.core.deployment import Deployment
from headrace.core.errors import ConfigError, InvalidRequest, LimitExceeded, Overloaded, from_code
from headrace.core.limits import EdgeLimits, Limit, WireLimits
from headrace.core.records import RequestRecord
from headrace.core.request import Sampling

N = Limit("n", 1, 4, "choices")


@pytest.mark.parametrize("value", [1, 4])
def test_values_inside_pass_unchanged(value: int) -> None:
    assert N.integer(value) == value


@pytest.mark.parametrize("value", [0, -1, 5, 10**9, 10**400, True, "3", 1.5, None, [1]])
def test_values_outside_are_refused_with_bound_and_name(value: object) -> None:
    with pytest.raises(
        LimitExceeded, match=r"n must be an integer between 1 and 4 \(choices\)"
    ) as e:
        N.integer(value)
    assert e.value.param == "n"
    assert len(e.value.message) < 150  # a 400-digit number is not echoed


@pytest.mark.parametrize(
    ("value", "shown"), [(2, "2"), (0, "0"), ("1", "a string of 1 characters")]
)
def test_a_limit_of_one_value_names_it(value: object, shown: str) -> None:
    with pytest.raises(LimitExceeded) as e:
        Limit("n", 1, 1, "choices").integer(value)
    assert (e.value.message, e.value.param) == (f"only n = 1 is offered, got {shown}", "n")
    assert Limit("n", 1, 1).integer(1) == 1


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -0.1, 2.1, 10**400, "1", True])
def test_numbers_must_be_finite_and_inside(value: object) -> None:
    with pytest.raises(LimitExceeded, match="between 0 and 2"):
        Limit("temperature", 0, 2).number(value)


def test_sizes_name_the_bound_and_the_size() -> None:
    with pytest.raises(LimitExceeded, match="body_bytes is limited to 10 bytes, got 11"):
        Limit("body_bytes", 0, 10, "bytes").at_most(11)


@pytest.mark.parametrize(
    "make",
    [
        lambda: EdgeLimits(body_bytes=-1),
        lambda: WireLimits(frame_bytes=0),
        lambda: Deployment(numerics="exactly"),
        lambda: Deployment(local_prefill_rows=-1),
        lambda: Deployment(checkpoint="relative/folder"),
        lambda: Deployment(checkpoint="/folder", weights="thin"),
        lambda: Deployment(checkpoint="/folder", engram="disk"),
        lambda: Deployment(record_spacing_tokens=100),
        lambda: Deployment(record_spacing_tokens=129),
        lambda: Deployment(replay_depth_tokens=-1),
        lambda: EdgeLimits(messages="many"),  # type: ignore[arg-type]
    ],
)
def test_bad_settings_do_not_construct(make) -> None:
    with pytest.raises(ConfigError):
        make()


def test_sampling_checks_itself() -> None:
    for bad in ({"temperature": -1.0}, {"top_p": 0.0}, {"top_p": 1.1}, {"seed": -1}):
        with pytest.raises(InvalidRequest):
            Sampling(**bad)


def test_errors_travel_by_code() -> None:
    error = from_code("overloaded", "queue full")
    assert isinstance(error, Overloaded)
    assert error.status == 429
    assert from_code("no such code", "x").status == 500
    body = LimitExceeded("n is wrong", param="n").body()
    assert body == {
        "error": {
            "message": "n is wrong",
            "type": "invalid_request_error",
            "param": "n",
            "code": "limit_exceeded",
        }
    }


def test_the_fake_clock_moves_only_forward_and_only_when_told() -> None:
    clock = FakeClock(10.0)
    wall = clock.wall_s()
    clock.advance(2.5)
    assert clock.now_s() == 12.5
    assert clock.wall_s() == wall + 2.5
    with pytest.raises(ValueError, match="does not go back"):
        clock.advance(-1)


@pytest.fixture
def armed():
    yield faults.arm
    faults.disarm()


def test_points_are_silent_until_armed_and_then_count(armed) -> None:
    assert faults.hit("store.seal") is None
    armed("store.seal=drop@2, link.send=duplicate")
    assert [faults.hit("store.seal") for _ in range(3)] == [None, "drop", None]
    assert faults.fired("store.seal") == 1
    assert [faults.hit("link.send") for _ in range(2)] == ["duplicate", "duplicate"]
    assert faults.fired("engine.step") == 0


def test_raise_raises_and_unknown_names_are_refused(armed) -> None:
    armed("engine.step=raise")
    with pytest.raises(faults.InjectedFault, match=r"engine\.step"):
        faults.hit("engine.step")
    armed("engine.step=assert@2")
    assert faults.hit("engine.step") is None
    with pytest.raises(AssertionError, match=r"engine\.step"):
        faults.hit("engine.step")
    armed("engine.step=memory")
    with pytest.raises(MemoryError):
        faults.hit("engine.step")
    bad_shares = (f"engine.step=flip%{share}" for share in ("0/1", "2/1", "a/1", "0.5", "0.5/x"))
    for bad in ("nowhere=exit", "engine.step=explode", "engine.step=exit@x", *bad_shares):
        with pytest.raises(ConfigError):
            armed(bad)


def test_a_share_of_hits_is_drawn_from_its_seed(armed) -> None:
    drawn = []
    for seed in (7, 7, 8):
        armed(f"decode.load=flip%0.1/{seed}")
        drawn.append([faults.hit("decode.load") for _ in range(2000)])
        assert faults.fired("decode.load") == drawn[-1].count("flip")
    assert drawn[0] == drawn[1] != drawn[2]
    assert all(130 < hits.count("flip") < 270 for hits in drawn)


def test_exit_ends_the_process_at_once() -> None:
    code = (
        "from headrace.core import faults\n"
        "faults.arm_from_environment(loopback_only=True)\n"
        "faults.hit('store.seal'); print('alive', flush=True)\n"
        "faults.hit('store.seal'); print('still alive')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={"HEADRACE_FAULTS": "store.seal=exit@2", "PATH": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (137, "alive\n")


def test_faults_are_refused_on_an_open_process(monkeypatch) -> None:
    monkeypatch.setenv("HEADRACE_FAULTS", "store.seal=exit")
    with pytest.raises(ConfigError, match="loopback"):
        faults.arm_from_environment(loopback_only=False)


def test_records_are_one_line_of_json_with_known_stages() -> None:
    record = RequestRecord("r1", "a", "a", "chat", 1.0)
    record.stage("queue_s", 0.25)
    record.stage("queue_s", 0.25)
    with pytest.raises(KeyError, match="no stage"):
        record.stage("lunch_s", 1.0)
    line = record.json_line()
    assert "\n" not in line
    assert json.loads(line)["stages"] == {"queue_s": 0.5}
