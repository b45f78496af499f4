"""Listening TCP sockets of processes, read from the kernel's own tables.

Ray decides by environment variables, whose names may change, on which addresses it listens. So a
starting cluster does not trust them: it looks.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path

from headrace.core.errors import ConfigError

_LISTEN = "0A"  # TCP_LISTEN in /proc/net/tcp


@dataclass(frozen=True, slots=True, order=True)
class Listener:
    """One listening socket and one process that holds it."""

    address: str
    port: int
    pid: int

    @property
    def on_loopback(self) -> bool:
        address = ipaddress.ip_address(self.address)
        if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped:
            return address.ipv4_mapped.is_loopback
        return address.is_loopback


def listeners(pids: Collection[int] | None = None) -> list[Listener]:
    """Listening sockets of these processes, or of all whose descriptors may be read."""
    by_inode = _listening()
    found = set()
    for pid in _all_pids() if pids is None else pids:
        for inode in _socket_inodes(pid):
            if inode in by_inode:
                found.add(Listener(*by_inode[inode], pid))
    return sorted(found)


def refuse_open_listeners(pids: Collection[int], allowed_hosts: Iterable[str]) -> None:
    """Raises `ConfigError` naming every socket of these processes that listens neither on loopback
    nor on a configured address."""
    allowed = set()
    for host in allowed_hosts:
        with contextlib.suppress(OSError):
            allowed |= {str(info[4][0]) for info in socket.getaddrinfo(host, None)}
    bad = [one for one in listeners(pids) if not one.on_loopback and one.address not in allowed]
    if bad:
        shown = ", ".join(f"{one.address}:{one.port} (process {one.pid})" for one in bad)
        raise ConfigError(
            f"these sockets can be reached from other hosts: {shown}; configured are"
            f" {', '.join(sorted(allowed)) or 'none'}. --insecure starts all the same"
        )


def _listening() -> dict[int, tuple[str, int]]:
    found = {}
    for table in ("tcp", "tcp6"):
        with contextlib.suppress(OSError):
            for line in Path("/proc/net", table).read_text().splitlines()[1:]:
                words = line.split()
                if words[3] == _LISTEN:
                    host, _, port = words[1].partition(":")
                    found[int(words[9])] = (_address(host), int(port, 16))
    return found


def _address(digits: str) -> str:
    # the kernel prints each 32-bit word of the address in the host's byte order
    raw = b"".join(
        int(digits[i : i + 8], 16).to_bytes(4, "little") for i in range(0, len(digits), 8)
    )
    return str(ipaddress.ip_address(raw))


def _socket_inodes(pid: int) -> list[int]:
    found = []
    with contextlib.suppress(OSError):
        for entry in os.scandir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                target = os.readlink(entry.path)
                if target.startswith("socket:["):
                    found.append(int(target[8:-1]))
    return found


def _all_pids() -> list[int]:
    return [int(entry) for entry in os.listdir("/proc") if entry.isdigit()]
