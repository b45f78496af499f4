"""Names of everything measured, in one place, so that dashboards and code cannot disagree.

Prometheus names: `headrace_` + the value; units at the end. Rooms create the collectors.
"""

from __future__ import annotations

from enum import StrEnum


class Metric(StrEnum):
    REQUESTS = "headrace_requests_total"  # labels: endpoint, outcome
    REQUESTS_OPEN = "headrace_requests_open"
    REQUESTS_WAITING = "headrace_requests_waiting"
    STAGE_SECONDS = "headrace_stage_seconds"  # labels: stage
    TTFT_SECONDS = "headrace_ttft_seconds"
    TOKEN_GAP_SECONDS = "headrace_token_gap_seconds"
    PROMPT_TOKENS = "headrace_prompt_tokens_total"
    COMPLETION_TOKENS = "headrace_completion_tokens_total"
    CACHED_TOKENS = "headrace_cached_tokens_total"
    HIT_TOKENS = "headrace_hit_tokens_total"  # labels: tier
    ROWS = "headrace_rows_total"  # labels: pool, half
    SAVED_ROWS = "headrace_saved_rows_total"
    HANDOFF_EXTRA_ROWS = "headrace_handoff_extra_rows_total"
    ROUTED = "headrace_routed_total"  # labels: pool, replica, reason
    ROUTE_SECONDS = "headrace_route_seconds"
    RETRIES = "headrace_retries_total"
    REPLICAS = "headrace_replicas"  # labels: pool, state
    BACKLOG_MS = "headrace_backlog_ms"  # labels: pool, replica
    REPLICA_REQUESTS = "headrace_replica_requests"  # labels: pool, replica
    REPLICA_FREE_BLOCKS = "headrace_replica_free_blocks"
    REPLICA_PARKED = "headrace_replica_parked"  # labels: pool, replica
    RESIDENT_TOKENS = "headrace_resident_tokens"
    LATE_MESSAGES = "headrace_late_messages_total"  # labels: kind
    WIRE_REFUSED = "headrace_wire_refused_total"  # labels: pool, replica
    STORE_HITS = "headrace_store_hits_total"  # labels: kind, tier
    STORE_MISSES = "headrace_store_misses_total"
    STORE_DAMAGED = "headrace_store_damaged_total"
    STORE_BYTES = "headrace_store_bytes"  # labels: tier
    STORE_DROPPED = "headrace_store_dropped_total"
    INDEX_ERRORS = "headrace_index_errors_total"
