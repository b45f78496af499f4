"""Engram addresses: table primes, multipliers and row numbers of n-grams. numpy only.

Rows depend on token ids alone, so they are computed before any layer runs.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:  # a configuration is validated by what is here
    from headrace.model.config import ModelConfig

Ints = NDArray[np.int64]

# Bases for which Miller-Rabin is proven deterministic below 3.3e24; sizes here stay below 2^31.
_WITNESSES = (2, 3, 5, 7, 11, 13)


def is_prime(n: int) -> bool:
    """Miller-Rabin, deterministic for every n below 3.3e24."""
    if n < 2:
        return False
    for p in _WITNESSES:
        if n % p == 0:
            return n == p
    d, s = n - 1, 0
    while d % 2 == 0:
        d, s = d // 2, s + 1
    for a in _WITNESSES:
        x = pow(a, d, n)
        if x in (1, n - 1):
            continue
        for _ in range(s - 1):
            x = x * x % n
            if x == n - 1:
                break
        else:
            return False
    return True


def table_primes(n_layers: int, max_ngram: int, n_heads: int, bound: int) -> list[list[list[int]]]:
    """Table sizes [engram layer][n-gram size - 2][head]: ascending primes >= bound, none twice."""
    used: set[int] = set()
    layers: list[list[list[int]]] = []
    for _ in range(n_layers):
        sizes: list[list[int]] = []
        for _ in range(max_ngram - 1):
            candidate = bound - 1  # the search restarts for every n-gram size, skipping used ones
            heads: list[int] = []
            while len(heads) < n_heads:
                candidate += 1
                if candidate not in used and is_prime(candidate):
                    used.add(candidate)
                    heads.append(candidate)
            sizes.append(heads)
        layers.append(sizes)
    return layers


def multipliers(layer_id: int, max_ngram: int, compressed_vocab_size: int) -> Ints:
    """Odd multipliers [max_ngram] of one layer; products with a mapped id stay below 2^63."""
    bound = max(1, (2**63 - 1) // compressed_vocab_size // 2)
    generator = np.random.default_rng(10007 * layer_id)
    return generator.integers(0, bound, size=max_ngram) * 2 + 1


@dataclass(frozen=True)
class EngramHash:
    """Addresses of one Engram layer. `primes` and `offsets` are int64 [max_ngram - 1, heads]."""

    multipliers: Ints
    primes: Ints
    offsets: Ints

    @property
    def n_rows(self) -> int:
        return int(self.primes.sum())

    def rows(self, mapped: Ints) -> Ints:
        """Row numbers [n, (max_ngram - 1) * heads] for mapped ids [n, max_ngram], newest first."""
        products = mapped * self.multipliers
        mixed = np.bitwise_xor.accumulate(products, axis=1)[:, 1:]
        rows = mixed[:, :, None] % self.primes + self.offsets
        return rows.reshape(mapped.shape[0], -1)


def build_hashes(
    layer_ids: tuple[int, ...],
    max_ngram: int,
    n_heads: int,
    bound: int,
    compressed_vocab_size: int,
) -> tuple[EngramHash, ...]:
    """Addresses of all Engram layers in layer order."""
    hashes = []
    for layer_id, sizes in zip(
        layer_ids, table_primes(len(layer_ids), max_ngram, n_heads, bound), strict=True
    ):
        primes = np.asarray(sizes, dtype=np.int64)
        offsets = (np.cumsum(primes.ravel()) - primes.ravel()).reshape(primes.shape)
        hashes.append(
            EngramHash(multipliers(layer_id, max_ngram, compressed_vocab_size), primes, offsets)
        )
    return tuple(hashes)


def hashes_of(config: ModelConfig) -> tuple[EngramHash, ...]:
    """`build_hashes` of a configuration."""
    return build_hashes(
        config.engram_layer_ids,
        config.engram_max_ngram_size,
        config.engram_n_heads,
        config.engram_vocab_size,
        config.engram_compressed_vocab_size,
    )


def map_history(
    history_ids: Ints, history_image: NDArray[np.bool_], token_map: Ints, pad_token_id: int
) -> Ints:
    """Mapped ids [n, max_ngram] after the dead rule.

    A position before the start (id -1), a pad token or one inside an image span is dead, and
    so is everything older than a dead one; the dead take the mapped id of the pad token.
    """
    dead = (history_ids < 0) | (history_ids == pad_token_id) | history_image
    dead = np.logical_or.accumulate(dead, axis=1)
    return np.where(dead, token_map[pad_token_id], token_map[np.where(dead, 0, history_ids)])


def sum_of_primes(layer_count: int, max_ngram: int, n_heads: int, bound: int) -> tuple[int, ...]:
    """Rows of each Engram layer's table, the config's `engram_num_embeddings`."""
    layers = table_primes(layer_count, max_ngram, n_heads, bound)
    return tuple(sum(sum(heads) for heads in sizes) for sizes in layers)


def ascending(values: tuple[int, ...]) -> bool:
    return all(a < b for a, b in pairwise(values))
