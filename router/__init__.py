"""The one public door of a cluster: HTTP in, server-sent events out.

An OpenAI-style request is checked (`validate`), rendered and tokenised (`protocol`, `tokens`),
given to replicas (`policy` chooses, `replicas` holds the links, `ledger` counts) and followed to
exactly one terminal event (`requests`); `app` is the bare ASGI callable, `server` the HTTP edge
under it, `records` what is measured of every request; `fetch` gets pictures from listed hosts.
Stateless apart from its load ledger: several routers run side by side and know nothing of each
other. No torch, no ray; Redis only through the store room's door.
`run_router` serves until stopped.
"""

from headrace.router.keys import ApiKey
from headrace.router.role import run_router
from headrace.router.settings import RouterSettings

__all__ = ["ApiKey", "RouterSettings", "run_router"]
