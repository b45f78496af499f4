"""Pictures in hand-off mode `state`: prefill runs their rows to N, decode goes on behind them."""

from __future__ import annotations

from typing import Any

import pytest

from headrace.core.request import HandoffMode
from headrace.core.rows import StartKind

MODEL = "toy"
DEPLOYMENT = {"handoff_mode": HandoffMode.STATE}
STORE = {"picture_bytes": 64 << 10, "state_bytes": 64 << 10}
pytestmark = pytest.mark.asyncio(loop_scope="module")


async def test_a_picture_before_and_at_the_end(service: Any) -> None:
    words = service.text(500, "state")
    bodies = (
        service.chat("look", service.png(1), words),
        service.chat(words, service.png(2), "?"),
        service.chat(words, service.png(3)),
    )
    for body in bodies:
        encoded = service.counts("encoded")
        await service.ask(body)
        record = service.record()
        assert (record["mode"], record["start_kind"]) == ("state", StartKind.STATE)
        assert service.counts("encoded") == encoded + 1
