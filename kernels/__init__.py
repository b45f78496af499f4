"""One function per operation; a dispatcher picks the implementation.

`kernels_for(device)` returns a `Kernels`: rms_norm, rope, the stream mixes, attention over
gathered keys, indexer scores and stable selection, experts, Engram, and the KV formats
between values and packed bytes. Contracts (shapes, dtypes, what is mutated) stand at the torch
references in the modules of this room; these are also the CPU path. Nothing here knows a
request, a block table or a layer: tensors in, tensors out.
"""

from headrace.kernels.dispatch import OPERATIONS, Kernels, kernels_for
from headrace.kernels.rope import frequencies, phases, yarn_frequencies
from headrace.kernels.rope_rows import rope_row_scales

__all__ = [
    "OPERATIONS",
    "Kernels",
    "frequencies",
    "kernels_for",
    "phases",
    "rope_row_scales",
    "yarn_frequencies",
]
