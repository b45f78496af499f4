"""Redis killed, which means restarted empty, and frozen, under load: nobody's answer depends on it,
and what was stored before is found again afterwards."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import redis

pytestmark = [pytest.mark.ray, pytest.mark.fault]
Live = Any  # the cluster of conftest.py
Question = Any  # of crowd.py
Until = Callable[..., None]

FREEZE_S = 2.5  # longer than the lease of a membership record


def run_id(live: Live) -> str:
    """Names one life of the server. It keeps nothing on disk, so another life began empty."""
    client = redis.Redis(unix_socket_path=str(live.run.valkey_socket))
    assert client.config_get("save", "appendonly") == {"save": "", "appendonly": "no"}
    return str(client.info("server")["run_id"])


# By default test_2_faults.py freezes it in a hand-off, and tests/faults/roles without Ray.
@pytest.mark.parametrize("how", ["killed", pytest.param("frozen", marks=pytest.mark.slow)])
def test_redis_under_load(
    live: Live,
    mixed: list[Question],
    probes: tuple[Question, Question],
    crowd: Any,
    ask: Any,
    until: Until,
    how: str,
) -> None:
    live.settled()
    (probe, _), tenant = probes, live.fresh_tenant()
    assert ask(live, probe, tenant).right
    until(lambda: not live.stat().index_unlisted, 20.0, "not listed")
    server, life = live.process("valkey-server"), run_id(live)
    with crowd(live, mixed) as load:
        load.more(2)
        if how == "killed":
            live.kill(server.pid)
        else:
            with live.frozen(server.pid):
                time.sleep(FREEZE_S)
                load.more(1)
                assert live.process_state(server.pid) == "T"
                assert live.ready()
        load.more(3)
    load.check()
    live.settled()
    assert (run_id(live) != life) == (how == "killed")
    until(lambda: live.stat().index == "ok" and not live.stat().index_unlisted, 30.0, "not listed")
    known = len(live.records())
    assert ask(live, probe, tenant).right
    record = live.next_record(known)
    assert (record["prefill_rows"], record["cached_tokens"]) == (0, 256)
    live.settled()
