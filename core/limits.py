"""Every limit of the system: one named field, one validator, one error with bound and value."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

from headrace.core.errors import ConfigError, LimitExceeded


@dataclass(frozen=True, slots=True)
class Limit:
    """A closed range for one named value. `unit` appears in the message (`tokens`, `bytes`)."""

    name: str
    low: float
    high: float
    unit: str = ""

    def integer(self, value: object) -> int:
        """`value` as an int inside the range; bools, strings and fractions are refused.

        Raises `LimitExceeded` with `param` = the limit's name."""
        if isinstance(value, bool) or not isinstance(value, int):
            raise self._error(value, "an integer")
        if not self.low <= value <= self.high:
            raise self._error(value, "an integer")
        return value

    def number(self, value: object) -> float:
        """`value` as a finite float inside the range. Raises `LimitExceeded`."""
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self._error(value, "a number")
        try:
            number = float(value)
        except OverflowError:
            raise self._error(value, "a number") from None
        if not math.isfinite(number) or not self.low <= number <= self.high:
            raise self._error(value, "a number")
        return number

    def at_most(self, value: int) -> int:
        """`value` if it does not exceed the upper bound. Raises `LimitExceeded`."""
        if value > self.high:
            unit = f" {self.unit}" if self.unit else ""
            raise LimitExceeded(
                f"{self.name} is limited to {_show(self.high)}{unit}, got {_show(value)}",
                param=self.name,
            )
        return value

    def _error(self, value: object, what: str) -> LimitExceeded:
        if self.low == self.high:
            only = f"only {self.name} = {_show(self.low)} is offered, got {_show(value)}"
            return LimitExceeded(only, param=self.name)
        unit = f" ({self.unit})" if self.unit else ""
        low, high = (repr(x) if isinstance(x, int) else _show(x) for x in (self.low, self.high))
        return LimitExceeded(  # a bound is ours and shown whole, the value is a client's
            f"{self.name} must be {what} between {low} and {high}{unit}, got {_show(value)}",
            param=self.name,
        )


def _show(value: object) -> str:
    """A value as it may appear in a message: short, whatever a client sent."""
    if isinstance(value, float) and value.is_integer() and abs(value) < 1e15:
        return str(int(value))
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) >= 10**18:
        return "an integer of more than 18 digits"
    if isinstance(value, str):
        return f"a string of {len(value)} characters"
    text = repr(value)
    return text if len(text) <= 40 else text[:37] + "..."


@dataclass(frozen=True, slots=True)
class EdgeLimits:
    """What the HTTP edge accepts. Sizes in bytes, durations in seconds, one field a limit."""

    body_bytes: int = 8 << 20
    header_bytes: int = 64 << 10  # target, names, values and 4 bytes a field
    header_fields: int = 128  # of a head, and of the trailer behind a chunked body
    header_deadline_s: float = 10.0
    body_deadline_s: float = 30.0
    json_depth: int = 64
    messages: int = 1024
    prompt_chars: int = 4 << 20
    prompt_tokens: int = 1 << 20
    completion_tokens: int = 65_536
    stop_strings: int = 16
    stop_chars: int = 256
    choices: int = 1
    top_logprobs: int = 0  # logprobs are not offered yet
    model_name_chars: int = 256
    key_chars: int = 512
    queued_requests: int = 256  # in line for room
    queue_wait_s: float = 60.0  # predicted for who comes now; or its deadline, if that is sooner
    stall_s: float = 60.0  # a client that takes nothing for this long is cancelled
    request_deadline_s: float = 600.0

    def __post_init__(self) -> None:
        _refuse_below(self, least=0)


@dataclass(frozen=True, slots=True)
class WireLimits:
    """What one process accepts from another."""

    frame_bytes: int = 64 << 20
    depth: int = 16
    unsent_bytes: int = 16 << 20  # posted to a peer that takes nothing
    connect_s: float = 2.0
    send_s: float = 10.0

    def __post_init__(self) -> None:
        _refuse_below(self, least=1)


@dataclass(frozen=True, slots=True)
class LeaseTimes:
    """How long things are held without a sign of life, in seconds."""

    handoff_s: float = 30.0  # sealed blocks of a live hand-off, renewed by either side
    member_s: float = 3.0  # a replica's record in the membership
    member_beat_s: float = 1.0
    member_poll_s: float = 0.2
    connection_reserve_s: float = 30.0  # reservations of a store client that went silent

    def __post_init__(self) -> None:
        _refuse_below(self, least=0)


@dataclass(frozen=True, slots=True)
class ImageLimits:
    """What a picture of a request may be, judged by its header alone; see `core.images`.

    One frame only: an animation is refused whatever its length. `pixels` bounds the memory that
    decoding takes, `scans` and `blocks` the work that a small hostile file can ask for."""

    images: int = 32  # per request
    file_bytes: int = 16 << 20
    pixels: int = 50_000_000
    side: int = 16_384
    scans: int = 64  # of a progressive JPEG: each touches every coefficient again
    parts: int = 100_000  # of a file, stepped over to find its header or its second frame

    def __post_init__(self) -> None:
        _refuse_below(self, least=1)

    def check_count(self, n_images: int, *, param: str = "images") -> None:
        """Raises `LimitExceeded` if one request carries more pictures than allowed."""
        Limit(param, 0, self.images, "images").at_most(n_images)


def _refuse_below(limits: object, *, least: float) -> None:
    for field in fields(limits):  # type: ignore[arg-type]  # callers pass dataclasses
        value = getattr(limits, field.name)
        if isinstance(value, bool) or not isinstance(value, int | float) or not value >= least:
            raise ConfigError(f"{field.name} must be a number of at least {least}, got {value!r}")
