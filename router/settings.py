"""What a router is told beyond what every role is told."""

from __future__ import annotations

import re
from dataclasses import dataclass

from headrace.core.errors import ConfigError
from headrace.router.keys import ApiKey

_HOST_PATTERN = re.compile(r"\*|(?:\*\.)?[a-z0-9-]{1,63}(?:\.[a-z0-9-]{1,63})+")


@dataclass(frozen=True, slots=True)
class FetchSettings:
    """From where pictures are fetched when a client gives an http(s) URL; see `router.fetch`.

    `hosts` holds names (`img.example.com`), names with everything below (`*.example.com`), or `*`
    for every host of the internet; empty refuses all. Whatever stands there, addresses that are not
    public are never connected to. Raises `ConfigError`."""

    hosts: tuple[str, ...] = ()
    max_bytes: int = 8 << 20  # all pictures of one request together
    deadline_s: float = 10.0  # the same, redirects included
    redirects: int = 3  # of one picture
    open_requests: int = 32  # requests that are fetched for at the same time

    def __post_init__(self) -> None:
        for host in self.hosts:
            if not _HOST_PATTERN.fullmatch(host) or host[-1].isdigit():
                raise ConfigError(
                    f"hosts must hold names in lower case, *.name or *, got {ascii(host)[:60]}"
                )
        for name, least, most in (
            ("max_bytes", 1, 1 << 30),
            ("deadline_s", 0.01, 600),
            ("redirects", 0, 10),
            ("open_requests", 1, 1 << 16),
        ):
            if not least <= getattr(self, name) <= most:
                raise ConfigError(
                    f"{name} must lie between {least} and {most}, got {getattr(self, name)!r}"
                )


@dataclass(frozen=True, slots=True)
class RouterSettings:
    """Settings of one router. Raises `ConfigError` naming key, bound and value.

    `host` and `port` are the public HTTP socket (port 0 picks one; the member record tells which).
    `tokenizer` is the name of a file in `headrace.configs/tokenizer` without `.json`, or a path.
    `model_aliases` are names accepted besides the model card's own. `salt_directory` is the store's
    directory, where the 32 random bytes behind all cache domains lie."""

    salt_directory: str
    keys: tuple[ApiKey, ...]
    host: str = "127.0.0.1"
    port: int = 8000
    tokenizer: str = "tokenizer-4096"
    model_aliases: tuple[str, ...] = ()
    default_max_tokens: int = 256  # when a request names none; less if the context has less left
    open_requests: int = 512  # accepted and not yet ended, queued ones included
    queue_ahead: int = 4  # jobs that a decode replica may hold beyond its state slots
    lookup_s: float = 0.05  # longest wait for the index; an answer normally takes 1 to 3 ms
    keepalive_s: float = 15.0  # a stream without a token for this long gets an SSE comment
    drain_s: float = 10.0  # at stop: how long open requests may still finish
    retries: int = 2  # further attempts in a row of one request that give no token
    crashes: int = 2  # losses in a row that make a request suspect; see `router.blame`
    resumes: int = 8  # of one answer, after its first token; 0: a lost decode ends a stream
    resume_wait_s: float = 30.0  # how long a further attempt waits while no decode is routable
    images: bool = False  # whether pictures are taken; a deployment with vision replicas takes them
    fetch: FetchSettings = FetchSettings()  # pictures behind URLs; by default none
    retry_share: float = 0.1  # of all requests
    prefill_rows_per_s: float = 2000.0  # until a replica has reported its own

    def __post_init__(self) -> None:
        if not self.keys:
            raise ConfigError("keys must hold at least one API key, got none")
        if len({key.key for key in self.keys}) != len(self.keys):
            raise ConfigError("keys must differ from each other")
        for name, least, most in (
            ("port", 0, 65535),
            ("default_max_tokens", 1, 1 << 20),
            ("open_requests", 1, 1 << 20),
            ("queue_ahead", 0, 1 << 16),
            ("lookup_s", 0, 10),
            ("keepalive_s", 0.01, 3600),
            ("drain_s", 0, 3600),
            ("retries", 0, 10),
            ("crashes", 1, 10),
            ("resumes", 0, 1000),
            ("resume_wait_s", 0, 3600),
            ("retry_share", 0, 1),
            ("prefill_rows_per_s", 1e-3, 1e12),
        ):
            value = getattr(self, name)
            whole = isinstance(RouterSettings.__dataclass_fields__[name].default, int)
            kind = int if whole else (int, float)
            if isinstance(value, bool) or not isinstance(value, kind) or not least <= value <= most:
                raise ConfigError(f"{name} must lie between {least} and {most}, got {value!r}")
