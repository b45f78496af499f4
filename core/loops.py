"""The event loop of a role: uvloop's where it is installed, else the standard one.

A question that one process asks another costs each of them a fifth less CPU with it (docs/LOG.md,
"the store's read path by the flight"). Its own clock moves in milliseconds: what is measured is
not taken from it.
"""

from __future__ import annotations

import asyncio


def new_event_loop() -> asyncio.AbstractEventLoop:
    """A loop that is the caller's to run and close."""
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()
