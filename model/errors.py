"""Errors of this room. `ConfigError` is core's; the other two say which input was at fault."""

from __future__ import annotations

from headrace.core.errors import ConfigError, HeadraceError

__all__ = ["BatchError", "ConfigError", "StateError"]


class BatchError(HeadraceError):
    """A row batch that breaks its contract: a bug of the caller, never of a client."""

    code = "row_batch_error"


class StateError(HeadraceError):
    """Bytes of another layout, numerics class or size than the state they should enter."""

    code = "state_error"
