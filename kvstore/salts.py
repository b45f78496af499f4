"""The 32 random bytes beside the store, from which the salts of all cache domains are derived."""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
from pathlib import Path

from headrace.core.chain import domain_salt
from headrace.core.errors import ConfigError

SALT_BYTES = 32
_NAME = "salt"


class SaltBook:
    """Salts of cache domains. Immutable; holds the secret, so it is never logged or sent.

    Losing the file makes every stored object unreachable, and nothing worse."""

    def __init__(self, master_salt: bytes) -> None:
        if len(master_salt) != SALT_BYTES:
            raise ConfigError(f"salt must hold {SALT_BYTES} bytes, got {len(master_salt)}")
        self._master = master_salt

    @staticmethod
    def ensure(directory: str) -> SaltBook:
        """The book of `<directory>/salt`, made (mode 600) if it is not there.

        Any number of processes may call this at once: the first one's bytes win. Raises
        `ConfigError` when the file has another length or others may read it."""
        folder = Path(directory)
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        path = folder / _NAME
        if not path.exists():
            _create(path)
        mode = path.stat().st_mode & 0o777
        if mode & 0o077:
            raise ConfigError(f"salt must be readable by its owner only (600), got {mode:o}")
        return SaltBook(path.read_bytes())

    @property
    def mark(self) -> bytes:
        """32 bytes that tell salts apart without telling a salt."""
        return salt_mark(self._master)

    def salt(self, domain: str) -> bytes:
        """The 32-byte salt of one cache domain; equal for equal names, whatever the process."""
        return domain_salt(self._master, domain)


def salt_mark(master_salt: bytes) -> bytes:
    """What stands for a salt in files and in Redis; nothing can be derived from it."""
    return hashlib.sha256(b"headrace salt mark" + master_salt).digest()


def _create(path: Path) -> None:
    # A finished file appears under the name at once: a reader never sees half a salt.
    temporary = path.with_name(f".{_NAME}.{os.getpid()}.{secrets.token_hex(4)}")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        os.write(descriptor, secrets.token_bytes(SALT_BYTES))
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    try:
        with contextlib.suppress(FileExistsError):
            os.link(temporary, path)
    finally:
        os.unlink(temporary)
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
