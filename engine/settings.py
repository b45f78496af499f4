"""Sizes of one engine, and which half of the model it runs."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from headrace.core.errors import ConfigError


class Half(StrEnum):
    """ENCODER makes blocks and window records of a prompt; FULL goes on to tokens."""

    ENCODER = "encoder"
    FULL = "full"


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """Raises `ConfigError` naming key, bound and value.

    `max_rows_per_step` bounds one step; `replay_rows_per_step` bounds the rows of known tokens in
    a step that also decodes, so that a long prompt does not stretch the gap between the tokens of
    others. `max_waiting` is for the owner of the engine: jobs it queues before it refuses.
    `park_after_tokens`: tokens that a sequence makes in its slot before it may have to give way to
    one that waits (0: never)."""

    n_blocks: int = 512
    n_slots: int = 16
    max_rows_per_step: int = 512
    replay_rows_per_step: int = 288
    max_waiting: int = 256
    park_after_tokens: int = 256

    def __post_init__(self) -> None:
        for name, least, most in (
            ("n_blocks", 1, 1 << 31),
            ("n_slots", 1, 1 << 16),
            ("max_rows_per_step", 1, 1 << 20),
            ("replay_rows_per_step", 1, 1 << 20),
            ("max_waiting", 0, 1 << 20),
            ("park_after_tokens", 0, 1 << 20),
        ):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
                raise ConfigError(
                    f"{name} must be an integer between {least} and {most}, got {value!r}"
                )
        if self.max_rows_per_step < self.n_slots:
            raise ConfigError(
                f"max_rows_per_step must be at least n_slots ({self.n_slots}), so that every"
                f" sequence decodes in every step, got {self.max_rows_per_step}"
            )
