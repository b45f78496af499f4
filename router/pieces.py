"""What arrives for a request: pieces of its answer, and the trouble that ends an attempt."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from headrace.core.errors import HeadraceError
from headrace.core.request import FinishReason
from headrace.router.budget import Loss


@dataclass(frozen=True, slots=True)
class Piece:
    """What a ticket gives next. With `restart` everything given before is void: another attempt
    begins at the first token (where resuming is off). An empty piece without `finish` means that
    nothing came in time."""

    token_ids: tuple[int, ...] = ()
    finish: FinishReason | None = None
    restart: bool = False


@dataclass(frozen=True, slots=True)
class Trouble:
    """An attempt has failed. `replica` is the key of the one to avoid next, if one is to blame.
    `loss`: that replica is gone, and others lost it too; None if this request alone is concerned.
    """

    error: HeadraceError
    retryable: bool
    replica: str = ""
    loss: Loss | None = None


Arrival: TypeAlias = Piece | Trouble
