"""Pictures in hand-off mode `replay`: the rows of a picture run again iff they lie above the start
of the replay. At the depth that rebuilds every window the text is that of one engine."""

from __future__ import annotations

from typing import Any

import pytest

from headrace.core import faults
from headrace.core.request import HandoffMode
from headrace.core.rows import Geometry, StartKind, floor_grain

MODEL = "toy"
DEPTH = Geometry(32, 2, 2).replay_rows  # of the toy
DEPLOYMENT = {"handoff_mode": HandoffMode.REPLAY, "replay_depth_tokens": DEPTH}
STORE = {"picture_bytes": 64 << 10}
pytestmark = pytest.mark.asyncio(loop_scope="module")


def with_a_picture(service: Any, where: str) -> dict[str, Any]:
    """A chat of one picture. R = min(H, F) is where decode starts but for the replay's depth."""
    n_behind = 300 if where == "before" else 100
    picture, behind = service.png(ord(where[0])), service.text(n_behind, where)
    for n_before in range(200, 600, 3):
        body: dict[str, Any] = service.chat(service.text(n_before, where), picture, behind)
        ids, (span,), _ = service.prompt(body)
        latest = min(floor_grain(len(ids)), len(ids) - service.cluster.keep_tokens)
        if {
            "before": span.end <= latest - DEPTH,
            "rebuilt": latest - DEPTH < span.start and span.end <= latest,
            "across": span.start < latest < span.end,
        }[where]:
            return body
    raise AssertionError(f"no length puts the picture there: {where}")


@pytest.mark.parametrize(("where", "needed"), [("before", 0), ("rebuilt", 1), ("across", 1)])
async def test_rows_that_a_replay_runs_need_their_picture(
    service: Any, where: str, needed: int
) -> None:
    """Cold; from stored blocks, when the index does not list the picture any more, so that vision
    is asked by each attempt that runs a row of it; the same with a loss, which makes it two."""
    body = with_a_picture(service, where)
    jobs, encoded = service.counts("jobs"), service.counts("encoded")
    for asked, lost in ((1, 0), (needed, 0), (2 * needed, 3)):
        if lost:
            faults.arm(f"decode.token=raise@{lost}")
        await service.ask(body)
        assert faults.fired("decode.token") == bool(lost)
        record = service.record()
        assert (record["mode"], record["exactness"]) == ("replay", "replayed")
        assert (record["start_kind"], record["resumes"]) == (StartKind.REPLAY, bool(lost))
        jobs += asked
        assert (service.counts("jobs"), service.counts("encoded")) == (jobs, encoded + 1)
        if not record["cached_tokens"]:
            await service.listed(body)
            await service.forget_pictures()
    prompt_tokens = len(service.prompt(body)[0])
    assert record["cached_tokens"] == floor_grain(prompt_tokens)
