"""The prefill replica of the small world: its jobs, for whom they are bound, what it tells."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from headrace.core.attempts import Verdict
from headrace.core.ids import JobKey
from headrace.core.messages import BindDecode
from headrace.prefill.binding import BindEvent, Binding, BindState
from headrace.prefill.jobs import TERMINAL as PREFILL_ENDS
from headrace.prefill.jobs import JobEvent, JobState

R, P, D = "router", "prefill", "decode"
_J = JobEvent


@dataclass(eq=False)
class PrefillJob:
    key: JobKey
    state: Any = JobState.FINDING
    binding: Binding = field(default_factory=Binding)
    product: list[str] = field(default_factory=list)
    sent: int = 0  # of the product, to the one that is bound


class Prefilling:
    """A part of `World`, which has the links, the laws and the store."""

    links: Any
    laws: Any
    store: Any
    objects: Any
    prefill: Any

    def prefill_hears(self, source: str, kind: str, key: Any) -> None:
        if kind == "bind":
            self.named(key)
            return
        if kind == "ack":
            self.acknowledged(key)
            return
        job = self.prefill.jobs.get(key)
        if kind == "job":
            if self.prefill.attempts.begin(key) is not Verdict.NEW:
                self.prefill.late += 1
                return
            for other in self.same(self.prefill.jobs, key):
                self.end_prefill(other, _J.CANCEL)
            job = self.prefill.jobs[key] = PrefillJob(key)
            for event in (_J.FOUND, _J.ADMITTED, _J.STARTED):
                job.state = self.laws.prefill.step(job.state, event, key).state
            if job.binding.step(BindEvent.NEAR):
                self.links[P, R].append(("wanted", key))
        else:
            self.prefill.attempts.close(key)
            if job is None:
                self.prefill.late += 1
            else:
                self.end_prefill(job, _J.CANCEL)

    def named(self, bind: BindDecode) -> None:
        job = self.prefill.jobs.get(bind.key)
        if job is None:
            self.prefill.late += 1
            self.links[P, R].append(("failed", bind.key))
        elif job.binding.name(bind):
            job.binding.step(BindEvent.LINKED)
            job.sent = 0
            self.tell(job)

    def tell(self, job: PrefillJob) -> None:
        """What the one that is bound was not told yet."""
        key = job.binding.decode_key
        if job.binding.state is not BindState.BOUND or key is None:
            return
        for kind in job.product[job.sent :]:
            self.links[P, D].append((kind, key))
            if kind == "done":
                job.binding.told = True
                self.links[P, R].append(("done", key))
        job.sent = len(job.product)

    def acknowledged(self, key: JobKey) -> None:
        found = [j for j in self.prefill.jobs.values() if j.binding.decode_key == key]
        for job in found:
            step = self.laws.prefill.step(job.state, _J.ACK, job.key)
            job.state = step.state
            if not step.ignored:
                self.close_prefill(job)

    def decode_gone(self, job: PrefillJob) -> None:
        key = job.binding.decode_key
        if key is not None and job.binding.step(BindEvent.GONE):
            self.links[P, R].append(("failed", key))

    def seal(self, job: PrefillJob) -> None:
        job.state = self.laws.prefill.step(job.state, _J.PRODUCT, job.key).state
        self.store.hold(job.key, self.objects[job.key.request_id])  # type: ignore[arg-type]
        job.product.append("blocks")
        self.tell(job)
        job.state = self.laws.prefill.step(job.state, _J.ROWS_DONE, job.key).state

    def all_sealed(self, job: PrefillJob) -> None:
        job.state = self.laws.prefill.step(job.state, _J.ALL_SEALED, job.key).state
        job.product.append("done")
        self.tell(job)

    def end_prefill(self, job: PrefillJob, event: JobEvent) -> None:
        step = self.laws.prefill.step(job.state, event, job.key)
        if step.ignored:
            return
        job.state = step.state
        self.close_prefill(job)

    def close_prefill(self, job: PrefillJob) -> None:
        self.prefill.attempts.close(job.key)
        self.store.release(job.key, None)
        assert job.state in PREFILL_ENDS
        del self.prefill.jobs[job.key]

    @staticmethod
    def same(jobs: dict[JobKey, Any], key: JobKey) -> list[Any]:
        """Other attempts of the same request."""
        return [j for k, j in jobs.items() if k.request_id == key.request_id and k != key]
