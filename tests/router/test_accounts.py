"""Hits by tier and rows saved, from what replicas counted."""

from __future__ import annotations

from typing import Any

import pytest

from headrace.core.records import RequestRecord
from headrace.router.accounts import by_tier
from headrace.router.records import Meters


@pytest.mark.parametrize(
    ("cached", "resident", "tiers", "expected"),
    [
        (0, 128, {"ssd": 256}, {}),
        (384, 384, {"host": 384}, {"resident": 384}),
        (512, 128, {"ssd": 256, "host": 256}, {"resident": 128, "host": 128, "ssd": 256}),
        (512, 0, {}, {"host": 512}),  # the index was away
        (256, 0, {"ssd": 512}, {"ssd": 256}),
    ],
)
def test_every_cached_token_has_one_tier(
    cached: int, resident: int, tiers: dict[str, int], expected: dict[str, int]
) -> None:
    split = by_tier(cached, resident, tiers)
    assert split == expected
    assert sum(split.values()) == cached


async def test_the_record_and_the_scrape_count_rows_really_run(rigs: Any) -> None:
    async with rigs(decodes=1, prefills=1, local_prefill_rows=0) as rig:
        rig.prefills[0].script.hit_tokens = 128
        body = {"model": "scripted", "prompt": [300 + i for i in range(600)], "max_tokens": 64}
        assert (await rig.client.post("/v1/completions", json=body)).status_code == 200
        record = rig.records()[-1]
        assert (record["prefill_rows"], record["encoder_rows"]) == (472, 7)
        assert record["saved_rows"] == 600 - 472 - 7
        assert record["hit_tokens"] == {"host": 128}
        scrape = (await rig.client.get("/metrics")).text
        assert 'headrace_hit_tokens_total{tier="host"} 128.0' in scrape
        assert "headrace_saved_rows_total 121.0" in scrape
        assert f"headrace_hits_saved_seconds {121 * 0.25 / 472}" in scrape
        assert 'headrace_rows_total{half="encoder",pool="prefill"} 472.0' in scrape


def test_rows_that_ran_twice_are_no_negative_savings() -> None:
    meters, record = Meters(), RequestRecord("r", "t", "d", "chat", 0.0)
    record.finish, record.saved_rows = "stop", -104
    meters.take(record)
    assert b"headrace_saved_rows_total 0.0" in meters.scrape()


def test_the_scrape_prices_rows_not_run_and_not_tokens_found() -> None:
    meters = Meters()
    for prefill_rows, hits, saved in ((500, {}, 0), (0, {"host": 128}, 0), (0, {"ssd": 640}, 500)):
        record = RequestRecord("r", "t", "d", "chat", 0.0, prefill_rows=prefill_rows)
        record.finish, record.hit_tokens, record.saved_rows = "stop", hits, saved
        record.stage("prefill_s", 1.0 if prefill_rows else 0.0)
        record.stage("load_s", 0.25)
        if prefill_rows:
            # No row was timed yet: what was spent alone is no loss.
            assert "\nheadrace_hits_net_seconds " not in meters.scrape().decode()
        meters.take(record)
    scrape = meters.scrape().decode()
    assert "headrace_hits_saved_seconds 1.0\n" in scrape
    assert 'headrace_hits_spent_seconds{part="load"} 0.5\n' in scrape
    assert 'headrace_hits_spent_seconds{part="replay"} 0.0\n' in scrape
    assert "headrace_hits_net_seconds 0.5\n" in scrape
