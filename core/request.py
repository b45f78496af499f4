"""A request as it travels between roles, and how its tokens are sampled."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from headrace.core.chain import BLOCK_TOKENS, TokenIds, block_digests
from headrace.core.errors import InvalidRequest
from headrace.core.ids import DIGEST_BYTES, Digest, JobKey, RequestId, new_request_id
from headrace.core.images import ImageSpan, span_block_digests, span_extras
from headrace.core.limits import Limit


class HandoffMode(StrEnum):
    """How a decode replica gets its state; see docs/architecture.md. Recorded per request."""

    EXACT = "exact"
    REPLAY = "replay"
    STATE = "state"


class HandoffBind(StrEnum):
    """When a request that prefill runs gets its decode replica; see docs/handoff.md."""

    LATE = "late"  # when at most one chunk of rows is left
    EARLY = "early"  # with its prefill replica


class FinishReason(StrEnum):
    STOP = "stop"  # a stop id was sampled; it is not part of the text
    LENGTH = "length"  # max_tokens reached


TEMPERATURE = Limit("temperature", 0.0, 2.0)
TOP_P = Limit("top_p", 1e-6, 1.0)
SEED = Limit("seed", 0, 2**63 - 1)


@dataclass(frozen=True, slots=True)
class Sampling:
    """Greedy when `temperature` is 0. Counter-based: the draw for a position depends only on
    (seed, position, logits), so a resumed or re-run sequence continues with the same tokens."""

    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        TEMPERATURE.number(self.temperature)
        TOP_P.number(self.top_p)
        SEED.integer(self.seed)


GREEDY = Sampling()


@dataclass(frozen=True, slots=True)
class GenRequest:
    """Everything a role needs to run a request. Immutable; the next attempt is a copy
    with another epoch.

    `digests` are those of the prompt's complete blocks in this namespace and domain; `chain_root`
    lets a decode replica go on with the chain over generated tokens. `keep_tokens` (and with it
    F = max(0, N - keep)) travels with the request: another keep would give another text."""

    request_id: RequestId
    epoch: int
    token_ids: TokenIds
    chain_root: Digest
    digests: tuple[Digest, ...]
    keep_tokens: int
    max_tokens: int
    sampling: Sampling
    stop_token_ids: tuple[int, ...]
    mode: HandoffMode
    domain: str  # cache domain, for quotas and metrics; bytes are separated by chain_root
    deadline_s: float  # seconds left when sent; clocks of two hosts are never compared
    images: tuple[ImageSpan, ...] = ()  # of the prompt, in order; the mask comes from these
    exact_root: Digest | None = None  # mode `replay`: root of the same chain in the exact namespace

    def __post_init__(self) -> None:
        if not self.token_ids:
            raise InvalidRequest("a prompt needs at least one token", param="prompt")
        if len(self.digests) != len(self.token_ids) // BLOCK_TOKENS:
            raise InvalidRequest("one digest per complete block of the prompt is needed")
        if any(len(d) != DIGEST_BYTES for d in (self.chain_root, *self.digests)):
            raise InvalidRequest(f"a digest has {DIGEST_BYTES} bytes")
        last_end = 0
        for span in self.images:
            if span.start < last_end:
                raise InvalidRequest("image spans must be in order and apart")
            last_end = span.end
        if last_end > len(self.token_ids):
            raise InvalidRequest("an image span ends after the prompt")
        if not 0 <= self.deadline_s < math.inf:
            raise InvalidRequest(f"deadline_s must be at least 0 seconds, got {self.deadline_s}")
        if self.max_tokens < 1:
            raise InvalidRequest(
                f"max_tokens must be at least 1, got {self.max_tokens}", param="max_tokens"
            )

    @classmethod
    def offline(
        cls,
        root: Digest,
        ids: TokenIds,
        *,
        keep_tokens: int,
        max_tokens: int,
        name: RequestId | None = None,
        epoch: int = 0,
        sampling: Sampling = GREEDY,
        stop_token_ids: Sequence[int] = (),
        images: Sequence[ImageSpan] = (),
    ) -> GenRequest:
        """A request that no router made: mode `exact`, in its own domain, without a time limit.
        Addresses are computed here; `name` is a new id unless given."""
        return cls(
            request_id=name or new_request_id(),
            epoch=epoch,
            token_ids=ids,
            chain_root=root,
            digests=span_block_digests(root, ids, images),
            keep_tokens=keep_tokens,
            max_tokens=max_tokens,
            sampling=sampling,
            stop_token_ids=tuple(stop_token_ids),
            mode=HandoffMode.EXACT,
            domain="offline",
            deadline_s=0.0,
            images=tuple(images),
        )

    @property
    def key(self) -> JobKey:
        return JobKey(self.request_id, self.epoch)

    def exact_digests(self, known_ids: TokenIds) -> tuple[Digest, ...]:
        """Digests of the complete blocks of `known_ids` (the prompt, or prompt and answer) in the
        exact namespace; () where the request's own chain is that one already."""
        if self.exact_root is None:
            return ()
        return block_digests(self.exact_root, known_ids, extras=span_extras(self.images))

    @property
    def n_tokens(self) -> int:
        """N, the prompt's length."""
        return len(self.token_ids)

    @property
    def first_decoder_row(self) -> int:
        """F of the first run."""
        return max(0, self.n_tokens - self.keep_tokens)
