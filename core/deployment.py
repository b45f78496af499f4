"""What all roles of one cluster must agree on: the model, its numerics, keep and hand-off mode."""

from __future__ import annotations

import os
from collections.abc import Collection
from dataclasses import dataclass

from headrace.core.errors import ConfigError
from headrace.core.limits import EdgeLimits, LeaseTimes, WireLimits
from headrace.core.request import HandoffBind, HandoffMode
from headrace.core.rows import Geometry

NUMERICS = ("auto", "invariant", "fast")  # auto: invariant on CPU, fast on GPU
ENGRAM = ("memory", "mapped", "pinned")
WEIGHTS = ("widened", "packed")
MAX_SEED = 2**63 - 1
MIN_FRAME_BYTES = 1 << 20  # a prompt of a million ids takes several; this one holds a small one
MAX_LEASE_S = 3600.0
MIN_RESERVE_S = 1.0  # a batch must be copied in a part of it, on a busy host too
MAX_UNDERWAY_WAIT = 1000.0


@dataclass(frozen=True, slots=True)
class Deployment:
    """Shared settings. `keep_tokens` 0 stands for the model's default (`Geometry.keep_for`), and
    `replay_depth_tokens` (mode `replay` only) 0 for W. `underway_wait_factor`: how many times its
    predicted time a prefill waits for blocks that another one computes; 0: it never waits.
    `weights` of a checkpoint are widened at load, or held `packed` and widened on use. `engram`:
    where its tables lie on a host; `mapped` ones in the checkpoint's files, or for random weights
    in `engram_directory`, one mapping for all processes; `pinned` needs a CUDA device.

    Whose weights: without `checkpoint` those that `model` names, which is a checkpoint of the
    package (`demo`) or a configuration, whose weights are random ones of `seed`. With `checkpoint`,
    the absolute path of a folder of weights, `model` is the name that clients say and nothing else.
    What only files can tell is checked by `headrace.model.ServedModel.check`."""

    model: str = "t2"
    seed: int = 0
    checkpoint: str = ""
    numerics: str = "auto"
    device: str = "cpu"
    keep_tokens: int = 0
    handoff_mode: HandoffMode = HandoffMode.EXACT
    handoff_bind: HandoffBind = HandoffBind.LATE
    replay_depth_tokens: int = 0
    local_prefill_rows: int = 512
    underway_wait_factor: float = 4.0
    record_spacing_tokens: int = 8192  # window records every so many tokens of a long run
    weights: str = "widened"
    engram: str = "memory"
    engram_directory: str = ""
    wire: WireLimits = WireLimits()
    leases: LeaseTimes = LeaseTimes()
    edge: EdgeLimits = EdgeLimits()

    def __post_init__(self) -> None:
        if self.numerics not in NUMERICS:
            raise ConfigError(f"numerics must be one of {NUMERICS}, got {self.numerics!r}")
        if self.checkpoint and not os.path.isabs(self.checkpoint):
            # Roles run in folders of their own.
            raise ConfigError(f"checkpoint must be an absolute path, got {self.checkpoint!r:.80}")
        if self.checkpoint and self.seed:
            raise ConfigError(f"seed must be 0 with a checkpoint's weights, got {self.seed!r:.40}")
        if (
            isinstance(self.seed, bool)
            or not isinstance(self.seed, int)
            or not (0 <= self.seed <= MAX_SEED)
        ):
            raise ConfigError(
                f"seed must be an integer between 0 and {MAX_SEED}, got {self.seed!r:.40}"
            )
        if self.engram not in ENGRAM:
            raise ConfigError(f"engram must be one of {ENGRAM}, got {self.engram!r}")
        if self.weights not in WEIGHTS:
            raise ConfigError(f"weights must be one of {WEIGHTS}, got {self.weights!r}")
        if self.wire.frame_bytes < MIN_FRAME_BYTES:
            raise ConfigError(
                f"wire.frame_bytes must be at least {MIN_FRAME_BYTES}, got {self.wire.frame_bytes}"
            )
        _check_leases(self.leases)
        for name, least in (
            ("keep_tokens", 0),
            ("replay_depth_tokens", 0),
            ("local_prefill_rows", 0),
            ("record_spacing_tokens", 128),
        ):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ConfigError(f"{name} must be an integer of at least {least}, got {value!r}")
        if self.replay_depth_tokens and self.handoff_mode is not HandoffMode.REPLAY:
            raise ConfigError(
                f"replay_depth_tokens must be 0 in handoff_mode {self.handoff_mode.value}: only"
                f" replay has a depth, got {self.replay_depth_tokens}"
            )
        wait = self.underway_wait_factor
        if type(wait) not in (int, float) or not 0 <= wait <= MAX_UNDERWAY_WAIT:
            raise ConfigError(
                f"underway_wait_factor must lie between 0 and {MAX_UNDERWAY_WAIT}, got {wait!r}"
            )
        if self.record_spacing_tokens % 128:
            raise ConfigError(
                f"record_spacing_tokens must be a multiple of 128, got {self.record_spacing_tokens}"
            )

    def check_model_name(self, packaged: Collection[str]) -> None:
        """Whether `model` and `checkpoint` say one thing; `packaged` are the package's own models.
        Looks at no file. Raises `ConfigError` naming key and value."""
        known = ", ".join(packaged)
        if self.checkpoint and self.model in packaged:
            raise ConfigError(
                "deployment.model must be a name of its own with deployment.checkpoint, none of the"
                f" package's {known}, got {self.model!r}"
            )
        # Roles run in folders of their own, where a relative path means another file.
        file = self.model.endswith(".json") and self.model.startswith("/")
        if not self.checkpoint and self.model not in packaged and not file:
            raise ConfigError(
                f"deployment.model must be one of {known} or the absolute path of a"
                " configuration's .json file; a folder of weights is deployment.checkpoint, and"
                f" deployment.model then its name; got {self.model!r:.80}"
            )

    def keep_for(self, geometry: Geometry) -> int:
        """The keep in force for a model: the configured one, or its default."""
        return geometry.keep_for(self.keep_tokens)

    def depth_for(self, window_tokens: int) -> int | None:
        """Rows of a replay in mode `replay`: the configured ones, or W; None in other modes."""
        if self.handoff_mode is not HandoffMode.REPLAY:
            return None
        return self.replay_depth_tokens or window_tokens

    @property
    def exactness(self) -> str:
        """The class of the namespace that this deployment writes."""
        return "replayed" if self.handoff_mode is HandoffMode.REPLAY else "exact"


def _check_leases(leases: LeaseTimes) -> None:
    for name in ("handoff_s", "member_s", "member_beat_s", "member_poll_s"):
        value = getattr(leases, name)
        if not 0 < value <= MAX_LEASE_S:
            raise ConfigError(
                f"leases.{name} must be above 0 and at most {MAX_LEASE_S}, got {value}"
            )
    reserve_s = leases.connection_reserve_s
    if not MIN_RESERVE_S <= reserve_s <= MAX_LEASE_S:
        raise ConfigError(
            f"leases.connection_reserve_s must be at least {MIN_RESERVE_S}"
            f" and at most {MAX_LEASE_S}, got {reserve_s}"
        )
    if leases.member_s <= leases.member_beat_s:
        raise ConfigError(
            "leases.member_s must be above leases.member_beat_s"
            f" ({leases.member_beat_s}), or a record ends between two beats,"
            f" got {leases.member_s}"
        )
