"""Whether Engram rows that are fetched when a call begins are there when their layer runs.

    .venv/bin/python bench/model/engram_prefetch.py [--rounds 12] [--directory /tmp]

T1 with tables of a million rows a head (2 x 198 MB as FP8 codes and scales, random bytes), layers 1
and 4 of 12. One call of 8 decode rows (8 sequences), and one of 256 prefill rows; every call reads
other rows. Four ways:

    resident   the codes in this process's memory
    warm       mapped, in the page cache
    cold       mapped; before every call the pages are dropped (madvise and posix_fadvise DONTNEED),
               and the major faults of the call are counted as proof
    cold, no prefetch   the same, gathered when the layer asks

`wait` is what the layers' requests for their rows took, `call` the whole call; medians. Hidden is
1 - wait with prefetch / wait without.

Then an engine's steps on cold mapped tables (dropped once, before the steps that are counted):
prefill in steps of 256 rows, and decode steps of 8 sequences, each with three ways:

    no prefetch  gathered when the layer asks
    call         begun when the call begins
    step before  told to the tables by the step before: the prompt's next rows when a step is
                 planned, a token's row when it is sampled

`wait` is summed over a step, medians over the steps.
"""

from __future__ import annotations

import argparse
import dataclasses
import mmap
import os
import resource
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from headrace.core.chain import as_token_ids
from headrace.core.ids import Digest, RequestId
from headrace.core.request import GenRequest, Sampling
from headrace.core.rows import plan_decode
from headrace.engine import Engine, EngineSettings, Half, Job
from headrace.engine.sequence import SequenceState
from headrace.model import CacheLayout, KvState, ModelConfig, Numerics, RowBatch, Trunk
from headrace.model.engram_hash import sum_of_primes
from headrace.model.engram_store import HostTable, StoredRows, map_file

BOUND = 1_000_000
CPU = torch.device("cpu")


def big_config() -> ModelConfig:
    c = ModelConfig.load("t1")
    sums = sum_of_primes(len(c.engram_layer_ids), c.engram_max_ngram_size, c.engram_n_heads, BOUND)
    return dataclasses.replace(c, engram_vocab_size=BOUND, engram_num_embeddings=sums)


class Table:
    """A table that times how long its results are waited for."""

    def __init__(self, inner: HostTable) -> None:
        self.inner = inner
        self.waited_s = 0.0

    @property
    def n_rows(self) -> int:
        return self.inner.n_rows

    @property
    def reads_ahead(self) -> bool:
        return self.inner.reads_ahead

    def expect(self, rows: Any) -> None:
        self.inner.expect(rows)

    def fetch(self, rows: Any) -> Callable[[], torch.Tensor]:
        result = self.inner.fetch(rows)

        def wait() -> torch.Tensor:
            began = time.perf_counter()
            out = result()
            self.waited_s += time.perf_counter() - began
            return out

        return wait


class Files:
    """The tables' files, and their mappings, which can be made cold."""

    def __init__(self, config: ModelConfig, directory: Path) -> None:
        self.parts: list[tuple[Path, np.ndarray]] = []
        self.rows: dict[int, StoredRows] = {}
        rng, width = np.random.default_rng(1), config.engram_head_dim
        for layer, n_rows in zip(
            config.engram_layer_ids, config.engram_num_embeddings, strict=True
        ):
            arrays = []
            for name, n_bytes in (("codes", width), ("scales", width // 32)):
                path = directory / f"engram-bench-{layer}-{name}"
                if name == "codes":
                    raw = rng.integers(0, 256, n_rows * n_bytes, dtype=np.uint8) & 0xF7
                else:
                    raw = np.full(n_rows * n_bytes, 119, dtype=np.uint8)
                raw.tofile(path)
                with path.open("rb+") as file:
                    os.fsync(file.fileno())  # a dirty page cannot be dropped
                mapped = map_file(path, raw.size)
                self.parts.append((path, mapped))
                arrays.append(mapped.reshape(n_rows, n_bytes))
            self.rows[layer] = StoredRows(arrays[0], arrays[1], torch.float8_e4m3fn)

    def drop(self) -> None:
        for path, mapped in self.parts:
            owner = mapped.base
            mapping = owner.obj if isinstance(owner, memoryview) else owner
            assert isinstance(mapping, mmap.mmap)
            mapping.madvise(mmap.MADV_DONTNEED)
            fd = os.open(path, os.O_RDONLY)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)

    def warm(self) -> None:
        for _, mapped in self.parts:
            int(mapped[::4096].sum())


def batch(config: ModelConfig, rng: np.random.Generator, n_sequences: int, m: int) -> RowBatch:
    """m rows of each sequence from position 0 on, with random ids before them too."""
    n, grams = n_sequences * m, config.engram_max_ngram_size
    zeros = torch.zeros(n, dtype=torch.int64)
    sequence = torch.arange(n_sequences).repeat_interleave(m)
    blocks = -(-m // 128)
    return RowBatch(
        history_ids=torch.from_numpy(rng.integers(31, 3900, (n, grams))),
        history_image=torch.zeros((n, grams), dtype=torch.bool),
        positions=torch.arange(m).repeat(n_sequences),
        slots=sequence,
        sequence=sequence,
        block_tables=torch.arange(n_sequences * blocks).view(n_sequences, blocks),
        swa_floor=zeros,
        decoder_floor=zeros,
        write_floor=zeros,
        decoder=torch.ones(n, dtype=torch.bool),
        logits=torch.zeros(n, dtype=torch.bool),
    )


def measure(
    config: ModelConfig, tables: dict[int, Table], shape: tuple[int, int], rounds: int, before: Any
) -> tuple[float, dict[int, float], float]:
    """Median call ms, wait ms by layer, and major faults a call."""
    trunk = Trunk.random(config, 1, Numerics.FAST, engram_tables=dict(tables))
    state = KvState(config, CacheLayout.of(config), 16, 8, Numerics.FAST)
    rng = np.random.default_rng(7)
    calls, waits, faults = [], {layer: [] for layer in tables}, []
    for number in range(rounds + 2):
        rows = batch(config, rng, *shape)
        for table in tables.values():
            table.waited_s = 0.0
        before()
        major = resource.getrusage(resource.RUSAGE_SELF).ru_majflt
        began = time.perf_counter()
        trunk.forward(rows, state)
        took = time.perf_counter() - began
        if number < 2:
            continue  # first calls make tables and threads
        faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_majflt - major)
        calls.append(took * 1e3)
        for layer, table in tables.items():
            waits[layer].append(table.waited_s * 1e3)
    middle = {layer: statistics.median(values) for layer, values in waits.items()}
    return statistics.median(calls), middle, statistics.median(faults)


ENGINE_WAYS = (("no prefetch", False, False), ("call", True, False), ("step before", True, True))


def request(n: int, name: str, max_tokens: int, rng: np.random.Generator) -> GenRequest:
    ids = as_token_ids([int(i) for i in rng.integers(31, 3900, n)])
    return GenRequest.offline(
        Digest(bytes(32)),
        ids,
        keep_tokens=44,
        max_tokens=max_tokens,
        name=RequestId(name),
        sampling=Sampling(temperature=1.0, seed=n),
    )


def engine_steps(
    trunk: Trunk, tables: dict[int, Table], files: Files, decode: bool
) -> list[tuple[float, dict[int, float], int]]:
    """(step ms, wait ms by layer, major faults) of every step that is counted."""
    settings = EngineSettings(n_blocks=40, n_slots=8, max_rows_per_step=256)
    engine = Engine(trunk, settings, Half.FULL, record_spacing_tokens=8192)
    rng = np.random.default_rng(11)
    for number in range(8 if decode else 1):
        one = request(32 if decode else 2048, f"r{number}", 40 if decode else 1, rng)
        engine.admit(Job(one, as_token_ids([]), 0))
        plan = plan_decode(one.n_tokens, 0, one.keep_tokens, (), engine.geometry)
        engine.start(one.key, plan)
    if decode:
        while any(s.state is SequenceState.KNOWN for s in engine.scheduler.sequences()):
            engine.step()
    files.drop()
    found = []
    while engine.has_work:
        for table in tables.values():
            table.waited_s = 0.0
        major = resource.getrusage(resource.RUSAGE_SELF).ru_majflt
        began = time.perf_counter()
        engine.step()
        took = (time.perf_counter() - began) * 1e3
        faults = resource.getrusage(resource.RUSAGE_SELF).ru_majflt - major
        found.append((took, {k: t.waited_s * 1e3 for k, t in tables.items()}, faults))
    return found[1:-1]  # the first's rows were told before the drop, the last tells of none


def measure_engine(config: ModelConfig, files: Files) -> None:
    print("| steps | fetched | step, ms | wait layer 1, ms | wait layer 4, ms | major faults |")
    print("|---|---|---|---|---|---|")
    for name, decode in (("prefill, 256 rows", False), ("decode, 8 rows", True)):
        waited = {}
        for way, prefetch, ahead in ENGINE_WAYS:
            tables = {
                layer: Table(HostTable(rows, torch.float32, CPU, prefetch, ahead))
                for layer, rows in files.rows.items()
            }
            trunk = Trunk.random(config, 1, Numerics.FAST, engram_tables=dict(tables))
            steps = engine_steps(trunk, tables, files, decode)
            took = statistics.median(step[0] for step in steps)
            waits = {k: statistics.median(step[1][k] for step in steps) for k in tables}
            faults = statistics.median(step[2] for step in steps)
            waited[way] = waits
            cells = " | ".join(f"{waits[layer]:.2f}" for layer in sorted(waits))
            shown = f"{name} x {len(steps)}"
            print(f"| {shown} | {way} | {took:.1f} | {cells} | {faults:.0f} |", flush=True)
        for way in ("call", "step before"):
            hidden = {k: 1 - waited[way][k] / waited["no prefetch"][k] for k in waited[way]}
            shown = ", ".join(f"layer {k} {v:.0%}" for k, v in hidden.items())
            print(f"  hidden by {way}: {shown}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--directory", type=Path, default=Path("/tmp"))
    args = parser.parse_args()
    torch.set_num_threads(1)
    config = big_config()
    files = Files(config, args.directory)
    resident = {
        layer: StoredRows(r.data.copy(), None if r.scale is None else r.scale.copy(), r.dtype)
        for layer, r in files.rows.items()
    }

    def nothing() -> None: ...

    ways = [
        ("resident", resident, True, nothing),
        ("warm", files.rows, True, files.warm),
        ("cold", files.rows, True, files.drop),
        ("cold, no prefetch", files.rows, False, files.drop),
    ]
    print("| rows | tables | call, ms | wait layer 1, ms | wait layer 4, ms | major faults |")
    print("|---|---|---|---|---|---|")
    for shape in ((8, 1), (1, 256)):
        waited: dict[str, dict[int, float]] = {}
        for name, stored, prefetch, before in ways:
            tables = {
                layer: Table(HostTable(rows, torch.float32, CPU, prefetch, reads_ahead=False))
                for layer, rows in stored.items()
            }
            call, waits, faults = measure(config, tables, shape, args.rounds, before)
            waited[name] = waits
            cells = " | ".join(f"{waits[layer]:.2f}" for layer in sorted(waits))
            print(f"| {shape[0]} x {shape[1]} | {name} | {call:.1f} | {cells} | {faults:.0f} |")
        cold, plain = waited["cold"], waited["cold, no prefetch"]
        hidden = {layer: 1 - cold[layer] / plain[layer] for layer in cold}
        print(f"  hidden: {', '.join(f'layer {k} {v:.0%}' for k, v in hidden.items())}")
    print()
    measure_engine(config, files)
    for path, _ in files.parts:
        path.unlink()


if __name__ == "__main__":
    main()
