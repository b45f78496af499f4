"""One function per operation; a dispatcher picks the implementation.

`kernels_for(device)` returns a `Kernels`: rms_norm, rope, the stream mixes, attention over
gathered keys, indexer scores and stable selection, experts, Engram, and the KV formats
between values and packed bytes. Contracts (shapes, dtypes, what is mutated) stand at the torch
references in the modules of this room; these are also the CPU path. Nothing here knows a
request, a block table or a layer: tensors in, tensors out.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from headrace.kernels.row_sizes import rope_row_scales

if TYPE_CHECKING:
    from headrace.kernels.dispatch import OPERATIONS, Kernels, kernels_for
    from headrace.kernels.rope import frequencies, phases, yarn_frequencies
else:
    # Names whose modules need torch are imported at their first use: sizes are asked for without.
    _HOMES = {
        **dict.fromkeys(("OPERATIONS", "Kernels", "kernels_for"), "dispatch"),
        **dict.fromkeys(("frequencies", "phases", "yarn_frequencies"), "rope"),
    }

    def __getattr__(name):
        if name not in _HOMES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return globals().setdefault(
            name, getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
        )


__all__ = [
    "OPERATIONS",
    "Kernels",
    "frequencies",
    "kernels_for",
    "phases",
    "rope_row_scales",
    "yarn_frequencies",
]
