"""The one error of checkpoint files."""

from __future__ import annotations

from headrace.core.errors import HeadraceError


class CheckpointError(HeadraceError):
    """A checkpoint that is damaged, incomplete or of another model.

    The message names the file (without its folder) or the tensor, what was found and what was
    wanted.
    """

    code = "checkpoint_error"
