"""The store's account as Prometheus metrics. Labels are bounded: tiers, kinds, reasons, and the
domains that have a share of their own; all others are `common`, and what nobody can tell `unknown`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from threading import Thread
from wsgiref.simple_server import WSGIServer

from prometheus_client import CollectorRegistry, generate_latest, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.core import Metric as Family
from prometheus_client.registry import Collector

from headrace.core.metrics import Metric
from headrace.kvstore.counters import UNKNOWN, Counters
from headrace.kvstore.policy import COMMON, DomainShare
from headrace.kvstore.settings import StoreStat, Tier


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What a scrape shows; taken on the store's own thread."""

    stat: StoreStat
    count: Counters
    index_lag_s: float
    pins: int
    pinned_bytes: int
    index_swept: int = 0


def group_names(shares: Iterable[DomainShare]) -> dict[int, str]:
    """Label of every group of domains."""
    named = {number: share.domain for number, share in enumerate(shares, COMMON + 1)}
    return {UNKNOWN: "unknown", COMMON: "common", **named}


def families(snapshot: Snapshot, names: Mapping[int, str]) -> Iterator[Family]:
    """The metrics of one moment. Pure."""
    stat, count = snapshot.stat, snapshot.count
    tenants = {names.get(group, "unknown"): tenant for group, tenant in count.tenants.items()}
    each = ("tier", "tenant")
    hits, promised = _counter(Metric.STORE_HIT_TOKENS, each), _counter(Metric.STORE_LOST, each)
    missed = _counter(Metric.STORE_MISSED_TOKENS, ("tenant",))
    for name, tenant in tenants.items():
        for tier in Tier:
            hits.add_metric([tier.value, name], tenant.hit_tokens[tier])
            promised.add_metric([tier.value, name], tenant.promised_tokens[tier])
        missed.add_metric([name], tenant.missed_tokens)
    yield from (hits, promised, missed)
    evictions = _counter(Metric.STORE_EVICTIONS, ("reason",))
    for why, n in count.evictions.items():
        evictions.add_metric([why.value], n)
    yield evictions
    bytes_, objects = _gauge(Metric.STORE_BYTES, ("tier",)), _gauge(Metric.STORE_OBJECTS, ("tier",))
    for tier, size, n in (
        (Tier.HOST, stat.arena_bytes, stat.arena_resident),
        (Tier.SSD, stat.ssd_bytes, stat.ssd_objects),
    ):
        bytes_.add_metric([tier.value], size)
        objects.add_metric([tier.value], n)
    yield from (bytes_, objects)
    plain: dict[Metric, float] = {
        Metric.STORE_DAMAGED: stat.damaged,
        Metric.STORE_DROPPED: stat.dropped,
        Metric.STORE_UNSAVED: stat.unsaved,
        Metric.STORE_LOADED: stat.loads,
        Metric.STORE_PREFETCHED: stat.prefetched,
        Metric.STORE_WRITTEN: stat.writes,
        Metric.STORE_RECYCLED: stat.recycled,
        Metric.STORE_WRITE_ERRORS: stat.write_errors,
        Metric.STORE_READ_ERRORS: count.read_errors,
        Metric.STORE_SLOW_READS: count.slow_reads,
        Metric.STORE_INDEX_SWEPT: snapshot.index_swept,
        Metric.STORE_INDEX_ERRORS: stat.index_errors,
    }
    for metric, value in plain.items():
        family = _counter(metric, ())
        family.add_metric([], value)
        yield family
    now: dict[Metric, float] = {
        Metric.STORE_PENDING: stat.pending,
        Metric.STORE_LEASED: stat.leased_objects,
        Metric.STORE_FREE_SLOTS: stat.arena_free,
        Metric.STORE_UNLISTED: stat.index_unlisted,
        Metric.STORE_INDEX_LAG: snapshot.index_lag_s,
        Metric.STORE_PINS: snapshot.pins,
        Metric.STORE_PINNED_BYTES: snapshot.pinned_bytes,
    }
    for metric, value in now.items():
        gauge = _gauge(metric, ())
        gauge.add_metric([], value)
        yield gauge
    for seconds in (count.load_s, count.sync_s):
        yield from seconds.collect()


class StoreMetrics(Collector):
    """A registry of its own, read at scrape time. `take` is called on whichever thread scrapes and
    must come back with a snapshot, or None when the store cannot say just now."""

    def __init__(self, take: Callable[[], Snapshot | None], shares: Iterable[DomainShare]) -> None:
        self._take = take
        self._names = group_names(shares)
        self.registry = CollectorRegistry()
        self.registry.register(self)

    def collect(self) -> Iterator[Family]:
        snapshot = self._take()
        if snapshot is not None:
            yield from families(snapshot, self._names)

    def describe(self) -> list[Family]:  # names are known at scrape time only
        return []

    def text(self) -> str:
        """A scrape as text."""
        return generate_latest(self.registry).decode()

    def serve(self, port: int) -> tuple[WSGIServer, Thread]:
        """Answer scrapes on this port of loopback, in a thread. Raises `OSError`."""
        return start_http_server(port, "127.0.0.1", self.registry)


def _counter(metric: Metric, labels: tuple[str, ...]) -> CounterMetricFamily:
    name = metric.value.removesuffix("_total")
    return CounterMetricFamily(name, _TEXTS.get(metric, name), labels=labels)


def _gauge(metric: Metric, labels: tuple[str, ...]) -> GaugeMetricFamily:
    return GaugeMetricFamily(metric.value, _TEXTS.get(metric, metric.value), labels=labels)


_TEXTS = {
    Metric.STORE_HIT_TOKENS: "tokens of blocks that were found, by where they lay",
    Metric.STORE_LOST: "tokens that were known and could not be delivered, by where they lay",
    Metric.STORE_MISSED_TOKENS: "tokens asked for and not found",
    Metric.STORE_EVICTIONS: "objects that left a tier, by reason; moved is no loss",
    Metric.STORE_BYTES: "payload bytes held",
    Metric.STORE_OBJECTS: "objects held",
    Metric.STORE_DAMAGED: "objects that did not verify",
    Metric.STORE_DROPPED: "puts refused for want of room",
    Metric.STORE_UNSAVED: "objects that stay in memory only",
    Metric.STORE_PREFETCHED: "objects brought while their request stood in line, there at its turn",
    Metric.STORE_INDEX_SWEPT: "records removed of stores that are gone",
    Metric.STORE_READ_ERRORS: "batches of a read that failed in an unforeseen way: misses",
    Metric.STORE_SLOW_READS: "objects whose read took longer than computing them anew: misses",
    Metric.STORE_INDEX_LAG: "time since the index last held everything; 0 when it does",
    Metric.STORE_PENDING: "objects that wait for their sync",
}
