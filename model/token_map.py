"""The Engram token map: token ids that look alike to a reader share one compressed id."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from tokenizers import Regex, Tokenizer, normalizers

# Stands for a lone space while surrounding space is stripped (private-use character).
_SPACE = "\ue000"


class TokenMap(NamedTuple):
    """`ids` is int64 [tokenizer vocabulary]; compressed ids lie in 0..compressed_size-1."""

    ids: NDArray[np.int64]
    compressed_size: int


def _normalizer() -> normalizers.Normalizer:
    return normalizers.Sequence(
        [
            normalizers.NFKC(),
            normalizers.NFD(),
            normalizers.StripAccents(),
            normalizers.Lowercase(),
            normalizers.Replace(Regex(r"[ \t\r\n]+"), " "),
            normalizers.Replace(Regex(r"^ $"), _SPACE),
            normalizers.Strip(),
            normalizers.Replace(_SPACE, " "),
        ]
    )


def build_token_map(tokenizer: str | Path | Tokenizer) -> TokenMap:
    """Map every token id (added tokens included) to its compressed id, in first-seen order.

    The key of an id is its normalised text when decoded alone; the raw text if normalising
    leaves nothing; the raw vocabulary entry if the text is not whole UTF-8.
    """
    if not isinstance(tokenizer, Tokenizer):
        tokenizer = Tokenizer.from_file(str(tokenizer))
    normalizer = _normalizer()
    seen: dict[str, int] = {}
    ids = np.empty(tokenizer.get_vocab_size(with_added_tokens=True), dtype=np.int64)
    for token in range(ids.shape[0]):
        text = tokenizer.decode([token], skip_special_tokens=False)
        if "\ufffd" in text:
            key = tokenizer.id_to_token(token) or text
        else:
            key = normalizer.normalize_str(text) or text
        ids[token] = seen.setdefault(key, len(seen))
    return TokenMap(ids, len(seen))
