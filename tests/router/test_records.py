"""Records and the scrape: counts that can be checked, no text, no tenant as a label."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from headrace.core import faults
from headrace.core.limits import EdgeLimits
from headrace.core.metrics import Metric
from headrace.core.records import STAGES, RequestRecord
from headrace.router.records import RecordFile

SHORT = {"model": "scripted", "prompt": "secret words", "max_tokens": 64}


async def scrape(rig: Any) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    answer = await rig.client.get("/metrics")
    assert answer.status_code == 200
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(answer.text)
        for sample in family.samples
    }


async def test_one_line_a_request_with_counts_and_without_text(rigs: Any) -> None:
    async with rigs(prefills=1, local_prefill_rows=0) as rig:
        await rig.client.post("/v1/completions", json=SHORT)
        body = {"model": "scripted", "prompt": [300] * 400, "max_tokens": 3, "stream": True}
        await rig.client.post("/v1/completions", json=body)
        chat = {"model": "scripted", "messages": [{"role": "user", "content": "secret words"}]}
        await rig.client.post("/v1/chat/completions", json=chat)
        first, second, third = rig.records()
        assert "secret" not in (rig.folder / "records.jsonl").read_text()
        assert [r["finish"] for r in (first, second, third)] == ["stop", "length", "stop"]
        assert [r["endpoint"] for r in (first, second, third)] == 2 * ["completions"] + ["chat"]
        assert first["prompt_tokens"] == 1 + len(rig.vocabulary.encode_plain("secret words"))
        assert first["completion_tokens"] == len(rig.reference_ids)
        assert (second["prompt_tokens"], second["completion_tokens"]) == (400, 3)
        assert (second["prefill_rows"], second["prefill"]) == (400, "prefill-0")
        assert (second["encoder_rows"], second["decoder_rows"]) == (7, 5)
        assert second["stages"]["prefill_s"] == 0.25
        for record in (first, second, third):
            assert set(record["stages"]) <= set(STAGES)
            assert 0 < record["stages"]["first_token_s"] <= record["stages"]["total_s"]
            assert record["tenant"] == record["domain"] == "a" and record["attempts"] == 1


async def test_the_scrape_agrees_with_the_records(rigs: Any) -> None:
    async with rigs(prefills=1, local_prefill_rows=0) as rig:
        before = await scrape(rig)
        assert before[("headrace_requests_open", ())] == 0
        for _ in range(3):
            await rig.client.post("/v1/completions", json=SHORT)
        body = {"model": "scripted", "prompt": [300] * 400, "max_tokens": 3}
        await rig.client.post("/v1/completions", json=body)
        await rig.client.post("/v1/completions", json=body | {"n": 2})
        await rig.client.get("/nowhere")
        rig.decodes[0].report(free_blocks=60, resident_tokens=512, parked_requests=3)
        replica = next(r for r in rig.router.replicas.all() if r.name == "decode-0")
        await rig.until(lambda: rig.router.ledger.last_report(replica.key))
        after = await scrape(rig)

        def value(name: str, **labels: str) -> float:
            return after[(name, tuple(sorted(labels.items())))]

        ends = {"endpoint": "completions"}
        assert value("headrace_requests_total", outcome="ok", **ends) == 4
        assert value("headrace_requests_total", outcome="limit_exceeded", **ends) == 1
        assert value("headrace_requests_total", endpoint="none", outcome="not_found") == 1
        records = rig.records()
        for name, key in (
            ("headrace_prompt_tokens_total", "prompt_tokens"),
            ("headrace_completion_tokens_total", "completion_tokens"),
            ("headrace_cached_tokens_total", "cached_tokens"),
        ):
            assert value(name) == sum(record[key] for record in records)
        assert value("headrace_rows_total", pool="prefill", half="encoder") == 400
        assert value("headrace_rows_total", pool="decode", half="decoder") == 20
        assert value("headrace_ttft_seconds_count") == 4
        assert value("headrace_stage_seconds_count", stage="total_s") == 4
        assert value("headrace_replicas", pool="decode", state="ready") == 1
        at = {"pool": "decode", "replica": "decode-0"}
        assert value("headrace_replica_requests", **at) == 0
        assert value("headrace_replica_free_blocks", **at) == 60
        assert value("headrace_resident_tokens", **at) == 512
        assert value("headrace_replica_parked", **at) == 3
        assert value("headrace_routed_total", reason="only-choice", **at) == 4
        names = {name for name, _ in after}
        for metric in (
            *(Metric.RETRIES, Metric.INDEX_ERRORS, Metric.BACKLOG_MS, Metric.HANDOFF_EXTRA_ROWS),
            *(Metric.ROUTE_SECONDS, Metric.TOKEN_GAP_SECONDS),
        ):
            assert any(name.startswith(metric.value) for name in names), metric
        # G4: whose requests these were is nobody's business who may scrape.
        assert not any("tenant" in label for _, labels in after for label in dict(labels))


def test_a_full_disk_costs_a_record_and_nothing_else(tmp_path: Path) -> None:
    file = RecordFile(tmp_path / "records.jsonl")
    full = os.open("/dev/full", os.O_WRONLY)
    os.dup2(full, file._fd)
    file.write(RequestRecord("id", "t", "d", "chat", 0.0))
    assert file.lost == 1
    file.close()
    os.close(full)


def test_lines_of_two_writers_stay_whole(tmp_path: Path) -> None:
    files = [RecordFile(tmp_path / "records.jsonl") for _ in range(2)]
    for i in range(200):
        files[i % 2].write(RequestRecord(f"id-{i}", "t", "d", "chat", 0.0))
    lines = (tmp_path / "records.jsonl").read_text().splitlines()
    assert [json.loads(line)["request_id"] for line in lines] == [f"id-{i}" for i in range(200)]
    assert (tmp_path / "records.jsonl").stat().st_mode & 0o777 == 0o600


async def test_dispatch_faults_take_effect_and_end_right(rigs: Any) -> None:
    try:
        async with rigs(edge=EdgeLimits(request_deadline_s=0.3)) as rig:
            faults.arm("router.dispatch=drop@1,link.send=sleep@1000000")
            answer = await rig.client.post("/v1/completions", json=SHORT)
            assert faults.fired("router.dispatch") == 1 and answer.status_code == 504
            assert not rig.decodes[0].jobs
            faults.disarm()
        async with rigs() as rig:  # what is to be answered has time for it
            faults.arm("router.dispatch=duplicate@1")
            answer = await rig.client.post("/v1/completions", json=SHORT)
            assert faults.fired("router.dispatch") == 1
            assert answer.json()["usage"]["completion_tokens"] == len(rig.reference_ids)
            assert len(rig.decodes[0].jobs) == 2
            faults.disarm()
            faults.arm("router.dispatch=raise@1")
            answer = await rig.client.post("/v1/completions", json=SHORT)
            assert faults.fired("router.dispatch") == 1
            assert answer.status_code == 500
            assert answer.json()["error"]["code"] == "injected_fault"
            faults.disarm()
            await rig.pulse()
    finally:
        faults.disarm()
