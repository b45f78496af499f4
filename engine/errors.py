"""Errors of this room."""

from __future__ import annotations

from headrace.core.errors import HeadraceError


class EngineDamaged(HeadraceError):
    """The engine's own accounts do not add up: a bug here, never the fault of a request.

    Nothing that it computes from then on may be trusted; the replica has to be restarted."""

    code = "engine_damaged"


class NotANumber(HeadraceError):
    """The logits of one sequence hold NaN, infinity, or no finite value at all."""

    code = "not_a_number"
