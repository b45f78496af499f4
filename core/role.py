"""What every role's process is told at start, whoever starts it (Ray actor or plain process)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from headrace.core.card import Member
from headrace.core.deployment import Deployment
from headrace.core.link import parse_address

Ready = Callable[[Member], None]  # called once, when the role serves and is announced


@dataclass(frozen=True, slots=True)
class RoleSettings:
    """Settings shared by all roles. `token` is the cluster token, never logged.

    `listen` is where this role's one socket is bound: loopback unless configured; port 0 picks one.
    `store_address` is the unix socket of this host's store; `run_dir` holds logs and records."""

    name: str
    listen: str
    token: str
    redis_url: str
    store_address: str
    run_dir: str
    build: str
    deployment: Deployment

    def __post_init__(self) -> None:
        parse_address(self.listen)

    @property
    def on_loopback(self) -> bool:
        """Whether this role can be reached from its own host only."""
        scheme, host, _ = parse_address(self.listen)
        return scheme == "unix" or host in ("127.0.0.1", "::1", "localhost")
