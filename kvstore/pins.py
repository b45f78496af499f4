"""Prefixes that people pinned: they stay on disk until their time is over.

A pin is a line in `pins.json` beside the segments: a name, the last block of a chain and an end.
The blocks before it follow from the headers. Pins survive restarts and are not leases: they hold
no arena slot, and they end by the clock of the wall.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import stat
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from headrace.core.errors import ConfigError, HeadraceError

log = logging.getLogger(__name__)
PINS_FILE = "pins.json"
MAX_PINS = 1000
MAX_TTL_S = 366 * 86_400.0
_LATEST_S = 253_402_300_799  # the end of the year 9999
_MOST_BYTES = 1 << 20  # of the file: 1,000 pins take less than 400 kB
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_HEX = re.compile(r"[0-9a-f]{64}")


class PinRefused(HeadraceError):
    """A pin that cannot be: an unknown prefix, or more than the quota."""

    code = "pin_refused"


@dataclass(frozen=True, slots=True)
class Pin:
    """One pinned prefix. `namespace` and `tip` (the digest of its last block) in hex."""

    name: str
    namespace: str
    tip: str
    expires_at_s: float  # Unix seconds

    def __post_init__(self) -> None:
        texts = (self.name, self.namespace, self.tip)
        if not all(isinstance(text, str) for text in texts):
            raise ConfigError("a pin's name, namespace and tip must be texts")
        end_s: object = self.expires_at_s
        number = isinstance(end_s, int | float) and not isinstance(end_s, bool)
        if not number or not 0 <= self.expires_at_s <= _LATEST_S:  # NaN neither
            raise ConfigError(
                f"a pin's expires_at_s must be a number from 0 to {_LATEST_S}, got {end_s!r:.40}"
            )
        if not _NAME.fullmatch(self.name):
            raise ConfigError(
                "a pin's name has 1 to 64 letters, digits, dots, dashes or underscores,"
                f" got {self.name[:80]!r}"
            )
        if not _HEX.fullmatch(self.namespace) or not _HEX.fullmatch(self.tip):
            raise ConfigError(f"pin {self.name}: namespace and tip have 64 hex digits each")


class PinBook:
    """The pins of one store and the keys that they hold. `chain(namespace, tip)` gives the keys and
    bytes of a stored prefix, from the tip to the root, or nothing when it is not whole."""

    def __init__(
        self,
        directory: str,
        quota_bytes: int,
        chain: Callable[[bytes, bytes], Mapping[bytes, int]],
        wall_s: Callable[[], float],
    ) -> None:
        self._path = Path(directory) / PINS_FILE
        self.quota_bytes = quota_bytes
        self._chain = chain
        self._wall_s = wall_s
        self._pins: dict[str, Pin] = {}
        self._held: dict[str, Mapping[bytes, int]] = {}
        self._keys: dict[bytes, int] = {}  # how many pins hold a key

    def __len__(self) -> int:
        return len(self._pins)

    def holds(self, key: bytes) -> bool:
        return key in self._keys

    @property
    def held_bytes(self) -> int:
        """Bytes of all pinned objects, each counted once."""
        sizes: dict[bytes, int] = {}
        for held in self._held.values():
            sizes.update(held)
        return sum(sizes.values())

    def pins(self) -> tuple[Pin, ...]:
        return tuple(self._pins.values())

    def load(self) -> None:
        """Take up what stands in the file. A pin whose prefix is not there any more holds nothing
        and stays until its time is over; the quota is not applied to what was granted before.

        A file that is no list of pins is moved aside: what is pinned is lost, the store starts."""
        try:
            found = read_pins(self._path.parent)
        except ConfigError as error:
            log.error("no chain is pinned: %s; it is %s now", error.message, self._move_aside())
            found = ()
        for pin in found:
            self._enter(pin, self._chain(bytes.fromhex(pin.namespace), bytes.fromhex(pin.tip)))
        self.expire()

    def pin(self, pin: Pin) -> int:
        """Pin a prefix, or give a pin of this name another prefix or end; the bytes all pins hold
        then. Raises `PinRefused`, with everything as before."""
        chain = self._chain(bytes.fromhex(pin.namespace), bytes.fromhex(pin.tip))
        if not chain:
            raise PinRefused(
                f"pin {pin.name}: the prefix that ends in {pin.tip[:16]} is not stored on disk as a"
                " whole"
            )
        if len(self._pins) >= MAX_PINS and pin.name not in self._pins:
            raise PinRefused(f"at most {MAX_PINS} pins, and there are as many")
        before = self._pins.get(pin.name), self._held.get(pin.name)
        self._leave(pin.name)
        self._enter(pin, chain)
        wanted_bytes = self.held_bytes
        if wanted_bytes > self.quota_bytes:
            self._restore(pin.name, *before)
            raise PinRefused(
                f"pin_share: pins may hold {self.quota_bytes} bytes, with {pin.name} they would"
                f" hold {wanted_bytes}"
            )
        self._write_or_restore(pin.name, *before)
        return wanted_bytes

    def unpin(self, name: str) -> bool:
        """End a pin; False when there is none of this name. Raises `PinRefused`, with everything as
        before, when the file cannot be written."""
        if name not in self._pins:
            return False
        before = self._pins[name], self._held[name]
        self._leave(name)
        self._write_or_restore(name, *before)
        return True

    def expire(self) -> int:
        """End the pins whose time is over; how many. Those that a failing disk leaves in the file
        are over at the next start, too."""
        now_s = self._wall_s()
        over = [name for name, pin in self._pins.items() if pin.expires_at_s <= now_s]
        for name in over:
            self._leave(name)
        if over:
            try:
                self._write()
            except OSError as error:
                log.warning("%d pins ended; the file was not written: %s", len(over), error)
        return len(over)

    def _write_or_restore(
        self, name: str, pin: Pin | None, held: Mapping[bytes, int] | None
    ) -> None:
        try:
            self._write()
        except OSError as error:
            self._restore(name, pin, held)
            raise PinRefused(f"{self._path} cannot be written ({error.strerror})") from None

    def _restore(self, name: str, pin: Pin | None, held: Mapping[bytes, int] | None) -> None:
        self._leave(name)
        if pin is not None and held is not None:
            self._enter(pin, held)

    def _enter(self, pin: Pin, chain: Mapping[bytes, int]) -> None:
        self._pins[pin.name] = pin
        self._held[pin.name] = chain
        for key in chain:
            self._keys[key] = self._keys.get(key, 0) + 1

    def _leave(self, name: str) -> None:
        self._pins.pop(name, None)
        for key in self._held.pop(name, {}):
            self._keys[key] -= 1
            if not self._keys[key]:
                del self._keys[key]

    def _move_aside(self) -> Path:
        """Where the file is now: beside itself, or, if it cannot be moved, where it was."""
        names = ["damaged", *(f"damaged-{n}" for n in range(2, 100))]
        for target in (self._path.with_name(f"{PINS_FILE}.{name}") for name in names):
            if not os.path.lexists(target):
                with contextlib.suppress(OSError):
                    os.rename(self._path, target)
                    return target
        return self._path

    def _write(self) -> None:
        write_pins(self._path.parent, self._pins.values())


def read_pins(directory: Path) -> tuple[Pin, ...]:
    """The pins of a store's directory. Raises `ConfigError` for a file that is none of ours."""
    path = directory / PINS_FILE
    try:
        mode = path.lstat().st_mode
        if not stat.S_ISREG(mode):
            raise ConfigError(f"{path} is no regular file, so no list of pins")
        with open(path, "rb") as source:
            data = source.read(_MOST_BYTES + 1)
    except FileNotFoundError:
        return ()
    except OSError as error:
        raise ConfigError(f"{path} cannot be read ({error.strerror})") from None
    if len(data) > _MOST_BYTES:
        raise ConfigError(f"{path} must have at most {_MOST_BYTES} bytes to be a list of pins")
    try:
        values = json.loads(data)
        if values["version"] != 1:
            raise ConfigError(f"{path} has format version {values['version']!r:.40}, not 1")
        pins = tuple(Pin(**item) for item in values["pins"])
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise ConfigError(f"{path} is no list of pins ({type(error).__name__})") from None
    except ConfigError as error:
        raise ConfigError(f"{path}: {error.message}") from None
    if len(pins) > MAX_PINS or len({pin.name for pin in pins}) < len(pins):
        raise ConfigError(f"{path} must have at most {MAX_PINS} pins, each name once")
    return pins


def write_pins(directory: Path, pins: Iterable[Pin]) -> None:
    """Replace the file, whole or not at all. Raises `OSError`."""
    path = directory / PINS_FILE
    temporary = path.with_name(f".{PINS_FILE}.{os.getpid()}")
    text = json.dumps({"version": 1, "pins": [asdict(pin) for pin in pins]}, indent=1)
    try:
        with open(temporary, "w", encoding="utf-8") as out:
            out.write(text + "\n")
            out.flush()
            os.fsync(out.fileno())
        os.replace(temporary, path)
    except OSError:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise
