"""Saying when the index lies in a Redis that evicts."""

from __future__ import annotations

import asyncio
import logging

from headrace.kvstore.redis_link import RedisAway, RedisLink

log = logging.getLogger(__name__)
_AGAIN_S = 60.0
KEEPS = "noeviction"


async def warn_of_eviction(link: RedisLink) -> frozenset[str]:
    """Ask the servers once, as soon as they answer, and log if one of them may take records out of
    the index: what it takes is not found until its object changes, and nobody is told. The policies
    that do so."""
    while True:
        try:
            policies = await link.eviction_policies()
        except RedisAway:
            await asyncio.sleep(_AGAIN_S)
            continue
        wrong = policies - {KEEPS}
        if wrong:
            log.warning(
                "Redis evicts (maxmemory-policy %s): look-ups will miss what is stored;"
                " set it to %s, `headrace store rebuild-index` lists everything again",
                ", ".join(sorted(wrong)),
                KEEPS,
            )
        return wrong
