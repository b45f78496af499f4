"""The rig of tests/router, once for all cases of a file."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest
import pytest_asyncio
import uvloop
from headrace_tests import module

from headrace.core.limits import EdgeLimits


@pytest.hookimpl(optionalhook=True)
def pytest_asyncio_loop_factories() -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    """The edge is tested on the loop that it runs on; it differs from asyncio's in what closed
    transports do."""
    return {"uvloop": uvloop.new_event_loop}


@pytest.fixture(scope="module")
def redis_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    from headrace.kvstore import embedded_valkey

    server = embedded_valkey(str(tmp_path_factory.mktemp("vk")))
    yield server.url
    server.stop()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def rig(redis_url: str, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Any]:
    """One decode and one prefill replica, small deadlines for whole heads and bodies."""
    from headrace.router.tokens import Vocabulary

    edge = EdgeLimits(header_deadline_s=0.5, body_deadline_s=0.7, stall_s=1.0)
    folder = tmp_path_factory.mktemp("rig")
    make = module("tests/router/conftest.py").running_rig
    async with make(
        redis_url, folder, Vocabulary("tokenizer-4096"), edge=edge, prefills=1
    ) as running:
        yield running
