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
    HITS_SAVED_SECONDS = "headrace_hits_saved_seconds"  # rows not run x measured row time
    HITS_SPENT_SECONDS = "headrace_hits_spent_seconds"  # labels: part (load | replay)
    HITS_NET_SECONDS = "headrace_hits_net_seconds"  # below 0: hits do not pay
    STORE_HIT_TOKENS = "headrace_store_hit_tokens_total"  # labels: tier, tenant
    STORE_LOST = "headrace_store_promised_not_delivered_tokens_total"  # labels: tier, tenant
    STORE_MISSED_TOKENS = "headrace_store_missed_tokens_total"  # labels: tenant
    STORE_EVICTIONS = "headrace_store_evictions_total"  # labels: reason
    STORE_BYTES = "headrace_store_bytes"  # labels: tier
    STORE_OBJECTS = "headrace_store_objects"  # labels: tier
    STORE_DAMAGED = "headrace_store_damaged_total"
    STORE_DROPPED = "headrace_store_dropped_total"
    STORE_UNSAVED = "headrace_store_unsaved_total"
    STORE_LOADED = "headrace_store_loaded_total"
    STORE_PREFETCHED = "headrace_store_prefetched_total"
    STORE_WRITTEN = "headrace_store_written_total"
    STORE_RECYCLED = "headrace_store_recycled_segments_total"
    STORE_WRITE_ERRORS = "headrace_store_write_errors_total"
    STORE_INDEX_SWEPT = "headrace_store_index_swept_total"
    STORE_READ_ERRORS = "headrace_store_read_errors_total"
    STORE_SLOW_READS = "headrace_store_slow_reads_total"
    STORE_INDEX_ERRORS = "headrace_store_index_errors_total"
    STORE_PENDING = "headrace_store_pending_objects"
    STORE_LEASED = "headrace_store_leased_objects"
    STORE_FREE_SLOTS = "headrace_store_free_slots"
    STORE_UNLISTED = "headrace_store_unlisted_objects"
    STORE_INDEX_LAG = "headrace_store_index_lag_seconds"
    STORE_PINS = "headrace_store_pins"
    STORE_PINNED_BYTES = "headrace_store_pinned_bytes"
    STORE_LOAD_SECONDS = "headrace_store_load_seconds"
    STORE_SYNC_SECONDS = "headrace_store_sync_seconds"
    INDEX_ERRORS = "headrace_index_errors_total"
    SALT_DIFFERS = "headrace_router_salt_differs"
