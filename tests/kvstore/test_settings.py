"""Every bound of the settings, by key, bound and value."""

from __future__ import annotations

import re

import pytest

from headrace.core.errors import ConfigError
from headrace.kvstore.arena import plan_regions
from headrace.kvstore.settings import Kind


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("directory", "", "directory must name the store's directory, got ''"),
        ("arena_bytes", 0, "arena_bytes must be an integer of at least 1, got 0"),
        ("arena_bytes", True, "arena_bytes must be an integer of at least 1, got True"),
        ("ssd_bytes", -5, "ssd_bytes must be an integer of at least 1, got -5"),
        ("segment_bytes", 1.5, "segment_bytes must be an integer of at least 1, got 1.5"),
        ("block_bytes", "3", "block_bytes must be an integer of at least 1, got '3'"),
        ("window_bytes", 0, "window_bytes must be an integer of at least 1, got 0"),
        ("group_bytes", 0, "group_bytes must be an integer of at least 1, got 0"),
        ("window_share", 0.0, "window_share must lie between 0.01 and 0.9, got 0.0"),
        ("window_share", 0.95, "window_share must lie between 0.01 and 0.9, got 0.95"),
        ("window_share", "x", "window_share must be a number, got 'x'"),
        ("group_s", -1, "group_s must lie between 0.0 and 60.0, got -1"),
        ("group_s", float("nan"), "group_s must lie between 0.0 and 60.0, got nan"),
        ("index_deadline_s", 0, "index_deadline_s must lie between 0.001 and 10.0, got 0"),
        ("claim_s", 0, "claim_s must lie between 0.1 and 3600.0, got 0"),
        ("prefetch_share", 0.91, "prefetch_share must lie between 0.0 and 0.9, got 0.91"),
        ("lock_memory", 1, "lock_memory must be true or false, got 1"),
        ("drain_s", 601, "drain_s must lie between 0.0 and 600.0, got 601"),
    ],
)
def test_a_bound_is_named(settings_for, key, value, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        settings_for(**{key: value})


def test_an_arena_too_small_for_both_kinds_is_refused(settings_for):
    with pytest.raises(ConfigError, match="arena_bytes must be at least 32769 .*, got 30000"):
        plan_regions(settings_for(arena_bytes=30_000))
    plan_regions(settings_for(arena_bytes=32_769))


def test_the_arena_is_cut_as_told(settings_for):
    settings = settings_for(arena_bytes=1 << 20, window_share=0.5)
    kv, swa = plan_regions(settings)
    assert (kv.kind, kv.slot_bytes, swa.kind, swa.slot_bytes) == (Kind.KV, 4096, Kind.SWA, 8192)
    assert (kv.start, kv.end) == (0, swa.start) and swa.end <= 1 << 20
    assert (kv.slots, swa.slots) == (128, 64)
    assert kv.offset(3) == 3 * 4096 and swa.offset(1) == kv.end + 8192
