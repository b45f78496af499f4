"""What is measured: one JSON line a request, and metrics for a scrape.

Labels are bounded by configuration (endpoints, stages, replicas): nothing a client sends becomes a
label, and no tenant does, since any key may read the scrape.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.core import Metric as Family
from prometheus_client.registry import Collector

from headrace.core.economics import Sums
from headrace.core.metrics import Metric
from headrace.core.records import RequestRecord

log = logging.getLogger(__name__)
TIME_BUCKETS_S = (
    *(0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5),
    *(1.0, 2.0, 5.0, 10.0, 20.0, 60.0, 300.0),
)


class RecordFile:
    """Appends one line a request. A full disk costs records, never a request."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        # O_APPEND: several routers of a host write whole lines into the same file.
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        self.lost = 0

    def write(self, record: RequestRecord) -> None:
        line = (record.json_line() + "\n").encode()
        try:
            if os.write(self._fd, line) != len(line):
                self.lost += 1
        except OSError as error:
            self.lost += 1
            log.warning("a record is lost: %s", error.strerror)

    def close(self) -> None:
        os.close(self._fd)


class Meters:
    """The router's collectors, in a registry of its own."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()

        def histogram(name: Metric, text: str, labels: tuple[str, ...] = ()) -> Histogram:
            return Histogram(name, text, labels, registry=registry, buckets=TIME_BUCKETS_S)

        def counter(name: Metric, text: str, labels: tuple[str, ...] = ()) -> Counter:
            return Counter(name, text, labels, registry=registry)

        self.requests = counter(Metric.REQUESTS, "answered", ("endpoint", "outcome"))
        self.stages = histogram(Metric.STAGE_SECONDS, "time in a stage", ("stage",))
        self.ttft = histogram(Metric.TTFT_SECONDS, "arrival to first byte of text")
        self.gaps = histogram(Metric.TOKEN_GAP_SECONDS, "mean time between tokens of a request")
        self.prompt_tokens = counter(Metric.PROMPT_TOKENS, "prompt tokens")
        self.completion_tokens = counter(Metric.COMPLETION_TOKENS, "generated tokens")
        self.cached_tokens = counter(Metric.CACHED_TOKENS, "prompt tokens found stored or resident")
        self.rows = counter(Metric.ROWS, "rows run", ("pool", "half"))
        self.hit_tokens = counter(Metric.HIT_TOKENS, "prompt tokens not computed", ("tier",))
        self.saved_rows = counter(Metric.SAVED_ROWS, "rows of a cold run that were not run")
        self.extra_rows = counter(Metric.HANDOFF_EXTRA_ROWS, "rows for want of a window record")
        self.route_seconds = histogram(Metric.ROUTE_SECONDS, "look-up and choice")
        self._sums = Sums()
        self.watch(self._economics)

    def watch(self, read: Callable[[], Iterable[Family]]) -> None:
        """Add gauges that are read at scrape time."""
        self.registry.register(_Live(read))

    def take(self, record: RequestRecord) -> None:
        """Count one ended request."""
        ok = record.finish in ("stop", "length")
        self.requests.labels(record.endpoint, "ok" if ok else record.finish).inc()
        for stage, seconds in record.stages.items():
            self.stages.labels(stage).observe(seconds)
        if "first_token_s" in record.stages:
            self.ttft.observe(record.stages["first_token_s"])
        if record.completion_tokens > 1:
            self.gaps.observe(record.token_gap_mean_s)
        self.prompt_tokens.inc(record.prompt_tokens)
        self.completion_tokens.inc(record.completion_tokens)
        self.cached_tokens.inc(record.cached_tokens)
        self.rows.labels("prefill", "encoder").inc(record.prefill_rows)
        self.rows.labels("decode", "encoder").inc(record.encoder_rows)
        self.rows.labels("decode", "decoder").inc(record.decoder_rows)
        self.rows.labels("prefill", "decoder").inc(record.prefill_decoder_rows)
        for tier, tokens in record.hit_tokens.items():
            self.hit_tokens.labels(tier).inc(tokens)
        self.saved_rows.inc(max(0, record.saved_rows))
        self.extra_rows.inc(record.handoff_extra_rows)

        self._sums.add(record)

    def _economics(self) -> Iterator[Family]:
        of = self._sums.economics()
        yield gauge(Metric.HITS_SAVED_SECONDS, "by hits in the store", (), {(): of.saved_s})
        spent: dict[tuple[str, ...], float] = {("load",): of.load_s, ("replay",): of.replay_s}
        yield gauge(Metric.HITS_SPENT_SECONDS, "for these hits", ("part",), spent)
        # Absent while no row has a price: what was spent alone would read as a loss.
        net: dict[tuple[str, ...], float] = {} if of.row_s is None else {(): of.net_s}
        yield gauge(Metric.HITS_NET_SECONDS, "saved less spent", (), net)

    def scrape(self) -> bytes:
        """The text of a scrape."""
        return generate_latest(self.registry)


class _Live(Collector):
    def __init__(self, read: Callable[[], Iterable[Family]]) -> None:
        self._read = read

    def collect(self) -> Iterator[Family]:
        yield from self._read()

    def describe(self) -> list[Family]:  # names are known at scrape time only
        return []


def gauge(
    name: Metric, text: str, labels: tuple[str, ...], values: Mapping[tuple[str, ...], float]
) -> Family:
    """A gauge family for `Meters.watch`: one sample for each tuple of label values."""
    family = GaugeMetricFamily(name.value, text, labels=labels)
    for at, value in values.items():
        family.add_metric(at, value)
    return family


def count(
    name: Metric, text: str, labels: tuple[str, ...], values: Mapping[tuple[str, ...], float]
) -> Family:
    """The same for a counter, whose name ends in `_total`."""
    family = CounterMetricFamily(name.value.removesuffix("_total"), text, labels=labels)
    for at, value in values.items():
        family.add_metric(at, value)
    return family
