"""From what replicas counted to a request's record: rows, hits by tier, rows saved."""

from __future__ import annotations

from collections.abc import Mapping

from headrace.core.messages import PrefillDone, StageTimes
from headrace.core.records import RequestRecord
from headrace.core.request import GenRequest


def note_prefill(record: RequestRecord, report: PrefillDone | None) -> None:
    """Rows and hit of the prefill replica, if one took part and reported."""
    if report is None:
        return
    record.prefill_rows = report.encoder_rows
    record.prefill_decoder_rows = report.decoder_rows
    record.prefill_hit_tokens = report.hit_tokens
    record.stage("prefill_s", report.run_s)


def note_decode(
    record: RequestRecord, request: GenRequest, times: StageTimes, tiers: Mapping[str, int]
) -> None:
    """What decode counted, after `note_prefill`. `tiers`: the index's tokens of the hit by tier."""
    record.encoder_rows, record.decoder_rows = times.encoder_rows, times.decoder_rows
    record.start_kind = times.start_kind
    record.exactness = times.exactness
    record.load_bytes = times.load_bytes
    record.committed_blocks = times.committed_blocks
    record.stage("prefill_wait_s", times.wait_s)
    record.stage("load_s", times.load_s)
    record.stage("replay_s", times.replay_s)
    record.stage("decode_s", times.decode_s)
    if record.prefill:
        bound = max(request.n_tokens - times.hit_tokens, request.keep_tokens + 127)
        record.handoff_extra_rows = max(0, times.encoder_rows - bound)
    resident = 0 if record.prefill else times.resident_tokens
    record.hit_tokens = by_tier(record.cached_tokens, resident, tiers)
    record.saved_rows = request.n_tokens - record.prefill_rows - times.encoder_rows


def by_tier(cached: int, resident: int, tiers: Mapping[str, int]) -> dict[str, int]:
    """Where the cached tokens came from: the engine's own blocks, then the store's tiers as the
    index knew them. What it did not know of was in the arena: it is listed a moment later."""
    resident = min(cached, resident)
    ssd = min(cached - resident, tiers.get("ssd", 0))
    split = {"resident": resident, "host": cached - resident - ssd, "ssd": ssd}
    return {tier: tokens for tier, tokens in split.items() if tokens}
