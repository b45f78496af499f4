"""API keys: a key belongs to a tenant, a tenant's requests live in a cache domain."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable
from dataclasses import dataclass

from headrace.core.errors import ConfigError, Unauthorized

MIN_KEY_CHARS = 8


@dataclass(frozen=True, slots=True)
class ApiKey:
    """One configured key. The domain defaults to the tenant's own; two tenants share stored
    prefixes only if the configuration gives them the same domain."""

    key: str
    tenant: str
    domain: str = ""

    def __post_init__(self) -> None:
        if not isinstance(self.key, str) or len(self.key) < MIN_KEY_CHARS:
            raise ConfigError(f"a key must have at least {MIN_KEY_CHARS} characters")
        if not self.key.isascii() or any(c.isspace() for c in self.key):
            raise ConfigError("a key must be ASCII without blanks")
        if not self.tenant:
            raise ConfigError("tenant must not be empty")

    def __repr__(self) -> str:  # a settings object ends up in logs; the secret must not
        return f"ApiKey(key=..., tenant={self.tenant!r}, domain={self.domain!r})"


@dataclass(frozen=True, slots=True)
class Principal:
    """Who is asking, as the key says; nothing a client sends beside the key changes it."""

    tenant: str
    domain: str


class KeyRing:
    """Finds the principal of an Authorization header. Immutable."""

    def __init__(self, keys: Iterable[ApiKey], max_key_chars: int) -> None:
        self._max_key_chars = max_key_chars
        self._entries = [
            (_fingerprint(k.key.encode()), Principal(k.tenant, k.domain or k.tenant)) for k in keys
        ]

    def principal(self, authorization: bytes | None) -> Principal:
        """The owner of a `Bearer` key. Raises `Unauthorized` for a missing, overlong or unknown
        one, with one message for all three.

        Every entry is compared, by digests of equal length in constant time, so that neither the
        time nor the order tells how much of a key was right."""
        scheme, _, key = (authorization or b"").partition(b" ")
        key = key.strip()
        found: Principal | None = None
        if scheme.lower() == b"bearer" and 0 < len(key) <= self._max_key_chars:
            offered = _fingerprint(key)
            for fingerprint, principal in self._entries:
                if hmac.compare_digest(fingerprint, offered):
                    found = principal
        if found is None:
            raise Unauthorized("a valid API key is needed: 'Authorization: Bearer <key>'")
        return found


def _fingerprint(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
