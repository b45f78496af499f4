"""What a job and a plan must fulfil before an engine touches them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from headrace.core.chain import BLOCK_TOKENS, TokenIds
from headrace.core.errors import InvalidRequest, LimitExceeded
from headrace.core.request import GenRequest
from headrace.core.rows import RowPlan, StartKind, floor_grain
from headrace.engine.jobs import Job
from headrace.engine.sequence import Sequence
from headrace.engine.settings import EngineSettings, Half


@dataclass(frozen=True, slots=True)
class ModelLimits:
    """What the model can take, in ids and positions."""

    vocab_size: int
    max_position_tokens: int


def blocks_to_reserve(request: GenRequest, half: Half) -> int:
    """All blocks that the sequence will ever touch: those of N + max_tokens positions, or the
    complete ones of the prompt when only the encoder half runs."""
    if half is Half.ENCODER:
        return request.n_tokens // BLOCK_TOKENS
    return -(-(request.n_tokens + request.max_tokens) // BLOCK_TOKENS)


def check_job(job: Job, half: Half, limits: ModelLimits, settings: EngineSettings) -> None:
    """Raises `InvalidRequest` for what can never run here, `ValueError` for an owner's mistake."""
    request = job.request
    _check_ids(request.token_ids, limits.vocab_size)
    _check_ids(job.generated_ids, limits.vocab_size)
    total = request.n_tokens + (request.max_tokens if half is Half.FULL else 0)
    if total > limits.max_position_tokens:
        raise LimitExceeded(
            f"prompt and completion together are limited to {limits.max_position_tokens} tokens,"
            f" got {total}",
            param="max_tokens",
        )
    wanted = blocks_to_reserve(request, half)
    if wanted > settings.n_blocks:
        raise LimitExceeded(
            f"prompt and completion together are limited to {settings.n_blocks} blocks of"
            f" {BLOCK_TOKENS} tokens here, got {wanted}",
            param="max_tokens",
        )
    if half is Half.FULL and len(job.generated_ids) >= request.max_tokens:
        raise InvalidRequest(
            f"{len(job.generated_ids)} of {request.max_tokens} tokens were generated already",
            param="max_tokens",
        )
    known = request.n_tokens + len(job.generated_ids)
    if half is Half.ENCODER and job.generated_ids:
        raise ValueError("generated tokens are no business of an engine with the encoder half")
    if not 0 <= job.hit_blocks <= known // BLOCK_TOKENS:
        raise ValueError(f"a hit of {job.hit_blocks} blocks in {known} tokens")


def check_plan(plan: RowPlan, sequence: Sequence, half: Half) -> None:
    """Raises `ValueError` when `plan` cannot be one of this sequence's plans."""
    known, key = len(sequence.ids), sequence.key
    if half is Half.FULL and plan.kind is StartKind.STATE:
        good_end = plan.end == known - (sequence.generated > 0)  # the newest token has no row
    elif half is Half.FULL:
        good_end = plan.start <= plan.decoder_start < plan.end == known
    else:
        good_end = plan.decoder_start == plan.end <= floor_grain(known)
    if not good_end or not 0 <= plan.start <= plan.end:
        raise ValueError(f"{key}: rows [{plan.start}, {plan.end}) do not fit {known} tokens")
    if plan.write_floor % BLOCK_TOKENS or plan.write_floor > sequence.hit_blocks * BLOCK_TOKENS:
        raise ValueError(
            f"{key}: write floor {plan.write_floor} with {sequence.hit_blocks} blocks admitted"
        )
    if plan.encoder_rows and plan.start > plan.write_floor:
        raise ValueError(f"{key}: rows [{plan.write_floor}, {plan.start}) would never be written")
    if plan.kind is StartKind.WINDOW and plan.window_position != plan.start:
        raise ValueError(f"{key}: a start at {plan.start} from a window at {plan.window_position}")


def _check_ids(ids: TokenIds, vocab_size: int) -> None:
    if ids and (worst := int(np.frombuffer(ids, dtype=np.uint32).max())) >= vocab_size:
        raise InvalidRequest(f"token ids must be below {vocab_size}, got {worst}", param="prompt")
