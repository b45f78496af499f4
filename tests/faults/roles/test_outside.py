"""What a hand-off stands on stops, dies or comes back empty in the middle of one: the store, Redis.
Nobody waits for either; what is lost is found or made again."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from headrace.core.limits import LeaseTimes
from headrace.kvstore import EmbeddedRedis, embedded_valkey

MODEL = "toy"
DEPLOYMENT = {"leases": LeaseTimes(handoff_s=4.0, member_s=2.0)}
pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.fault]


@pytest.fixture(scope="module")
def redis(run_dir: str) -> Iterator[list[EmbeddedRedis]]:
    """A Valkey of this module's own, that may be killed and started again; the newest is last."""
    servers = [embedded_valkey(f"{run_dir}/own")]
    yield servers
    servers[-1].stop()


@pytest.fixture(scope="module")
def roles(roles: Any, redis: list[EmbeddedRedis]) -> Any:
    return lambda name, **more: replace(roles(name, **more), redis_url=redis[0].url)


def last_record(service: Any) -> dict[str, Any]:
    path = Path(service.router._role.run_dir, "records.jsonl")
    record: dict[str, Any] = json.loads(path.read_text().splitlines()[-1])
    return record


def stands_still(proxy: Any, service: Any, kind: str, towards: str) -> tuple[Any, asyncio.Event]:
    """(moment, release): the first such frame waits in its proxy."""
    release, stuck = asyncio.Event(), []

    def rule(seen: Any) -> Any:
        if (seen.kind, seen.towards) == (kind, towards) and not release.is_set():
            stuck.append(seen)
            return proxy.held(release)
        return proxy.PASS

    service.traffic.reset(rule)
    return lambda: bool(stuck), release


@pytest.mark.redis
async def test_redis_killed_in_a_handoff_and_back_empty(
    service: Any, proxy: Any, prompt: Any, kinds: Any, redis: list[EmbeddedRedis]
) -> None:
    before, during = prompt(300, "before"), prompt(430, "during")
    await service.check(before, tenant=1)
    await service.expected(during)
    moment, release = stands_still(proxy, service, "PrefillDone", "decode")
    killed = kinds.kill(redis[-1].process.pid, moment)
    go_on = kinds.go_on(release)
    load = lambda: service.check(during, tenant=1)  # noqa: E731
    await kinds.Scenario(load, [killed, go_on], []).run()
    await service.check(prompt(310, "without"), tenant=1)
    redis[-1].process.wait()
    redis.append(embedded_valkey(str(Path(redis[0].url.removeprefix("unix://")).parent)))
    assert redis[-1].url == redis[0].url
    await service.routable()
    # What was listed and what was sealed meanwhile: the index has both again.
    for ids in (before, during):
        async with asyncio.timeout(60):
            while True:
                await service.check(ids, tenant=1)
                if f"hit {len(ids) // 128 * 128} of {len(ids)}" in last_record(service)["why"]:
                    break
                await asyncio.sleep(0.2)
    await service.pulse()


@pytest.mark.redis
async def test_redis_frozen_in_a_handoff(
    service: Any, proxy: Any, prompt: Any, kinds: Any, redis: list[EmbeddedRedis]
) -> None:
    """Members run out in it, replicas that speak do not."""
    prompts = [prompt(430 + i, f"frozen {i}") for i in range(3)]
    for ids in prompts:
        await service.expected(ids)
    moment, release = stands_still(proxy, service, "BlocksReady", "decode")
    frozen = kinds.stop(redis[-1].process.pid, moment)
    go_on = kinds.go_on(release)

    async def load() -> None:
        await service.check(prompts[0])
        await asyncio.sleep(2.5)  # longer than the record of a member lasts
        for ids in prompts[1:]:
            await service.check(ids)

    await kinds.Scenario(load, [frozen, go_on], [service.pulse]).run()


@pytest.mark.slow  # by default tests/cluster/live/test_2_pools.py stops a store under load
@pytest.mark.parametrize("rows_before", [640, 0])
async def test_a_store_that_stops_in_the_middle(
    cluster_with_store_process: Any, yardstick: Any, prompt: Any, kinds: Any, rows_before: int
) -> None:
    """Its socket stays open and says nothing: the roles give it up after 3 s and go on without."""
    cluster, store = cluster_with_store_process
    ids = prompt(1100, f"store stops {rows_before}")
    expected, stats = await yardstick.text(ids, 8), cluster.prefill.driver.stats
    moment = lambda: (  # noqa: E731
        cluster.prefill.driver.stats.encoder_rows_total >= stats.encoder_rows_total + rows_before
    )

    async def load() -> Any:
        call = await cluster.handoff(cluster.request(ids))
        await asyncio.wait_for(call.ended.wait(), 40)
        # Stopped until here, and the service goes on beside it.
        assert kinds.process_state(store.pid) == "T"
        alone = prompt(200, f"while stopped {rows_before}")
        again = await cluster.local(cluster.request(alone), decode=1)
        assert await again.result() == await yardstick.text(alone, 8)
        return call

    def text_or_retryable(call: Any) -> None:
        if call.failures:
            assert call.failures[0].retryable and not call.token_ids
        else:
            assert tuple(call.token_ids) == expected

    await kinds.Scenario(load, [kinds.stop(store.pid, moment)], [text_or_retryable]).run()
    replicas = (cluster.prefill, *cluster.decodes)
    await kinds.until(lambda: all(r.store.connected for r in replicas), 20, "not taken back")
    await cluster.at_rest(10.0)
    ids = prompt(500, f"store goes on {rows_before}")
    last = await cluster.handoff(cluster.request(ids))
    assert await last.result() == await yardstick.text(ids, 8)
    assert last.times.hit_tokens == 384
    await cluster.at_rest(10.0)
