"""Sizes of one vision replica."""

from __future__ import annotations

from dataclasses import dataclass

from headrace.core.errors import ConfigError
from headrace.core.limits import ImageLimits


@dataclass(frozen=True, slots=True)
class VisionSettings:
    """Raises `ConfigError` naming key, bound and value.

    `max_patches_per_step` bounds the patches of all pictures that share one pass of the tower (one
    larger picture runs alone); `max_waiting` jobs are queued before further ones are refused."""

    max_patches_per_step: int = 8192
    max_waiting: int = 256
    limits: ImageLimits = ImageLimits()

    def __post_init__(self) -> None:
        for name, least, most in (
            ("max_patches_per_step", 1, 1 << 24),
            ("max_waiting", 1, 1 << 20),
        ):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
                raise ConfigError(
                    f"{name} must be an integer between {least} and {most}, got {value!r}"
                )
