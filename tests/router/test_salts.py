"""Routers of one cluster need one salt; another one is said, and serves nobody in silence."""

from __future__ import annotations

import asyncio
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from headrace.core.errors import ConfigError

SHORT = {"model": "scripted", "prompt": "x", "max_tokens": 4}


async def test_a_second_router_with_another_salt_is_refused_and_told_what_to_do(
    rigs: Any, tmp_path: Path
) -> None:
    async with rigs() as rig:
        own = Path(rig.settings.salt_directory)
        other = tmp_path / "another host"
        rig.settings = replace(rig.settings, salt_directory=str(other))
        with pytest.raises(ConfigError, match=r"another router .* copy its file `salt` to .*host"):
            await rig.start_router()
        assert len(rig.routers) == 1
        shutil.copy(own / "salt", other / "salt")  # keeps mode 600
        await rig.start_router()
        await rig.until_routable(1, 0, router=1)
        second = rig.new_client(rig.urls[1])
        assert (await second.post("/v1/completions", json=SHORT)).status_code == 200
        await second.aclose()


async def test_after_the_end_of_the_one_another_salt_may_come(rigs: Any, tmp_path: Path) -> None:
    async with rigs() as rig:
        rig.stop_router(0)
        await rig._stops[0][1]
        rig.settings = replace(rig.settings, salt_directory=str(tmp_path / "new"))
        await rig.start_router()


async def test_two_that_began_while_redis_was_away_say_so_later(rigs: Any) -> None:
    async with rigs() as rig:
        first = rig.routers[0]
        assert not first.salt_differs
        # Redis forgot, and somebody of another salt was first to say so again.
        other = b"another mark".ljust(32)
        while not first.salt_differs:
            await first._board.leave_salt(first._salt_mark)
            await first._board.same_salt(other)
            await asyncio.sleep(0.05)
        text = (await rig.client.get("/metrics")).text
        assert "headrace_router_salt_differs 1.0" in text
        assert (await rig.client.post("/v1/completions", json=SHORT)).status_code == 200
        await first._board.leave_salt(other)
        await rig.until(lambda: not first.salt_differs)


async def test_the_mark_tells_nothing_of_the_salt(rigs: Any) -> None:
    async with rigs() as rig:
        secret = (Path(rig.settings.salt_directory) / "salt").read_bytes()
        mark = rig.routers[0]._salt_mark
        assert len(mark) == 32 and mark != secret
        board = rig.routers[0]._board
        stored = await board._link.get_many([board._salt_key.encode()])
        assert stored == [mark]
