"""One record per request: which stages it passed, how long each took, what was counted.

Written once, at the terminal event, as one JSON line and into histograms. It holds ids, counts and
seconds; never text.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field

STAGES = (
    "queue_s",
    "fetch_s",  # pictures behind URLs
    "tokenise_s",  # checks included, and fetching
    "vision_s",  # waiting for rows of pictures
    "prefill_wait_s",
    "prefill_s",
    "bind_s",  # from the word that prefill is nearly done until a decode replica is bound to it
    "seal_s",
    "load_s",
    "replay_s",
    "first_token_s",  # arrival to first byte of text: TTFT
    "decode_s",
    "delivery_s",
    "total_s",
)


@dataclass(slots=True)
class RequestRecord:
    """Mutable while the request lives; owned by its router."""

    request_id: str
    tenant: str
    domain: str
    endpoint: str
    arrived_at_s: float  # Unix seconds
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    pictures: int = 0  # spans of the prompt
    pictures_made: int = 0  # of them, those that a vision replica opened pixels for
    epoch: int = 0
    attempts: int = 0
    resumes: int = 0  # of these, attempts that went on after tokens of a former one
    rebinds: int = 0  # of these, attempts that took over the prefill of a lost decode replica
    mode: str = "exact"
    bind: str = ""  # of a hand-off: when its decode replica was chosen, late | early
    exactness: str = "exact"
    prefill: str = ""
    decode: str = ""
    why: str = ""  # the router's reason for its choice
    prefill_rows: int = 0
    prefill_decoder_rows: int = 0  # mode `state` only
    prefill_hit_tokens: int = 0
    hit_tokens: dict[str, int] = field(default_factory=dict)  # resident | host | ssd
    saved_rows: int = 0  # rows of a cold run less those really run; below 0 where some ran twice
    encoder_rows: int = 0
    decoder_rows: int = 0
    handoff_extra_rows: int = 0
    start_kind: str = ""
    load_bytes: int = 0
    committed_blocks: int = 0
    finish: str = ""  # stop | length | error code | cancelled
    stages: dict[str, float] = field(default_factory=dict)
    token_gap_mean_s: float = 0.0
    token_gap_max_s: float = 0.0

    def stage(self, name: str, seconds: float) -> None:
        """Add to a stage. Raises `KeyError` for a name that is no stage."""
        if name not in STAGES:
            raise KeyError(f"{name} is no stage; stages are {', '.join(STAGES)}")
        self.stages[name] = self.stages.get(name, 0.0) + seconds

    def json_line(self) -> str:
        """The record as one line of JSON, durations in seconds with microsecond digits."""
        values = asdict(self)
        values["stages"] = {name: round(s, 6) for name, s in self.stages.items()}
        return json.dumps(values, separators=(",", ":"), ensure_ascii=True)
