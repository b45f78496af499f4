"""Engram tables in memory, mapped and as stored codes: the same bits, one copy a host."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from headrace.model import ConfigError, ModelConfig, Numerics, Placement, Trunk
from headrace.model.checkpoint import Quantisation, ReleaseConfig, load_trunk, write_random
from headrace.model.engram_store import (
    HeldTable,
    HostTable,
    StoredRows,
    _Ahead,
    map_file,
    table_of,
)

CPU = torch.device("cpu")


def tables_of(trunk: Trunk) -> list[Any]:
    return [p.engram.table for p in trunk.params.layers if p.engram is not None]


@pytest.mark.parametrize("quantisation", [Quantisation(), None], ids=["fp8", "bf16"])
def test_a_checkpoint_s_mapped_tables_give_the_bits_of_widened_ones(
    quantisation: Quantisation | None, tmp_path: Path, state_and_logits: Callable[[Trunk], Any]
) -> None:
    release = ReleaseConfig(ModelConfig.load("toy"), quantisation)
    folder = tmp_path / "toy"
    write_random(folder, release, 5, max_shard_bytes=150_000)
    token_map = np.arange(1024) % 822
    held = load_trunk(folder, Numerics.INVARIANT, token_map=token_map)
    mapped = load_trunk(folder, Numerics.INVARIANT, token_map=token_map, engram=Placement.MAPPED)
    (table,) = tables_of(mapped)
    rows, width = 4062, 16
    codes = rows * width + rows * -(-width // 32)
    assert table.stored.n_bytes == (codes if quantisation else 2 * rows * width)
    assert state_and_logits(mapped) == state_and_logits(held)
    table = HostTable(table.stored, table.compute, CPU, prefetch=False)
    ids = np.array([[5, 4061], [0, 5]])
    values = tables_of(held)[0].values
    for one in (table, tables_of(mapped)[0]):
        assert torch.equal(one.fetch(ids)(), values[torch.from_numpy(ids)].flatten(1).double())


@pytest.mark.parametrize("n", [1, 3, 200])
def test_gathered_rows_are_in_order_whatever_the_number_of_tasks(n: int) -> None:
    values = torch.arange(5000.0).view(500, 10)
    rows = np.random.default_rng(n).integers(0, 500, (n, 24))
    wanted = values[torch.from_numpy(rows)].flatten(1).double()
    for placement in (Placement.MEMORY, Placement.MAPPED):
        table = table_of(values, placement, torch.float64, CPU)
        assert torch.equal(table.fetch(rows)(), wanted)
        first, second = table.fetch(rows), table.fetch(rows[::-1].copy())  # two calls in flight
        assert torch.equal(second(), wanted.flip(0))
        assert torch.equal(first(), wanted)


# Maps a file, reads all of it, then tells what the kernel says of the mapping.
READER = """
import pathlib, sys
from headrace.model.engram_store import map_file
path, n_bytes = pathlib.Path(sys.argv[1]), int(sys.argv[2])
raw = map_file(path, n_bytes)
print(int(raw[::4096].sum()), flush=True)
sys.stdin.readline()
inside, sizes = False, {}
for line in pathlib.Path("/proc/self/smaps").read_text().splitlines():
    if ":" not in line.split(" ")[0]:
        inside = line.endswith(str(path))
    elif inside and line.endswith("kB"):
        name, value = line.split(":")
        sizes[name] = int(value.split()[0])
print(sizes, flush=True)
sys.stdin.readline()
"""


def test_processes_share_one_copy_of_a_file(tmp_path: Path) -> None:
    """Two processes that read all of it: each counts half of its pages as its own share, none as
    private, anonymous or dirty."""
    path, n_bytes = tmp_path / "table", 8 << 20
    path.write_bytes(bytes(n_bytes))
    with path.open("rb+") as written:
        os.fsync(written.fileno())  # else its pages count as dirty until the kernel wrote them
    command = [sys.executable, "-c", READER, str(path), str(n_bytes)]
    pipe = subprocess.PIPE
    readers = [subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) for _ in range(2)]
    try:
        for reader in readers:
            assert reader.stdout is not None and reader.stdout.readline() == "0\n"
        for reader in readers:
            assert reader.stdin is not None and reader.stdout is not None
            reader.stdin.write("\n")
            reader.stdin.flush()
            sizes = ast.literal_eval(reader.stdout.readline())
            assert (sizes["Rss"], sizes["Pss"]) == (8192, 4096)
            for name in ("Private_Clean", "Private_Dirty", "Shared_Dirty", "Anonymous"):
                assert sizes[name] == 0, name
    finally:
        for reader in readers:
            reader.communicate("\n", timeout=60)


def test_mappings_are_read_only_and_of_the_right_size(tmp_path: Path) -> None:
    path = tmp_path / "table"
    path.write_bytes(bytes(100))
    raw = map_file(path, 100)
    with pytest.raises(ValueError, match="read-only"):
        raw[0] = 1
    with pytest.raises(ConfigError, match="table: found 100 bytes, wanted 101"):
        map_file(path, 101)
    with pytest.raises(ConfigError, match="absent: cannot be mapped"):
        map_file(tmp_path / "absent", 1)


def test_codes_are_decoded_as_the_checkpoint_s() -> None:
    """Every e4m3 number with every scale that occurs, against the definition."""
    codes = np.array([c for c in range(256) if c & 127 != 127] + [0, 0], dtype=np.uint8)
    data = np.tile(codes, (3, 1))
    scale = np.repeat(np.array([[100], [127], [140]], dtype=np.uint8), 8, axis=1)
    table = HostTable(StoredRows(data, scale, torch.float8_e4m3fn), torch.float64, CPU)
    found = table.fetch(np.array([[0], [1], [2]]))().numpy()
    sign = np.where(codes & 128, -1.0, 1.0)
    exponent, mantissa = (codes >> 3 & 15).astype(int), (codes & 7) / 8
    plain = sign * np.where(
        exponent == 0, mantissa * 2.0**-6, (1 + mantissa) * np.exp2(exponent - 7.0)
    )
    for row, byte in enumerate((100, 127, 140)):
        assert (found[row] == plain * 2.0 ** (byte - 127)).all()


def test_a_table_of_another_size_is_refused() -> None:
    config = ModelConfig.load("toy")
    short = HeldTable(torch.zeros(5, config.engram_head_dim), torch.float32)
    with pytest.raises(ConfigError, match="Engram table of layer 1: 5 rows, not 4062"):
        Trunk.random(config, 0, Numerics.FAST, engram_tables={1: short})


def resident_kb(path: Path) -> int:
    """What of a file's mappings in this process lies in memory, by the kernel's account."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if ":" not in line.split(" ")[0]:
            inside = line.endswith(str(path))
        elif inside and line.startswith("Rss:"):
            return int(line.split()[1])
    raise AssertionError(f"{path.name} is not mapped")


def test_expected_rows_are_read_in_and_others_are_not(tmp_path: Path) -> None:
    """300 rows of a page each: nothing is mapped before, exactly those after."""
    path, n_rows, width = tmp_path / "table", 5000, 4096
    with path.open("wb") as file:
        file.write(os.urandom(n_rows * width))
        os.fsync(file.fileno())
    raw = map_file(path, n_rows * width).reshape(n_rows, width)
    table = HostTable(StoredRows(raw, None, torch.uint8), torch.float64, CPU)
    rows = np.random.default_rng(3).permutation(n_rows)[:300].reshape(50, 6)
    with path.open("rb") as file:  # what lies in the page cache would be mapped around a fault
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    assert resident_kb(path) == 0
    assert HostTable(table.stored, table.compute, CPU, reads_ahead=False).expect(rows) is None
    table.expect(rows)
    deadline = time.monotonic() + 20
    while resident_kb(path) < 300 * 4 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert 300 * 4 <= resident_kb(path) < n_rows * 4
    assert torch.equal(table.fetch(rows)(), torch.from_numpy(raw[rows].reshape(50, -1)).double())


def test_hints_that_come_too_fast_are_dropped_and_reads_are_not(monkeypatch: Any) -> None:
    ahead, gate, taken = _Ahead(), threading.Event(), []

    def take(rows: np.ndarray) -> None:
        gate.wait(20)
        taken.append(len(rows))

    for n in range(100):
        ahead.touch(take, np.arange(n))
    monkeypatch.setattr("headrace.model.engram_store._ahead", lambda: ahead)
    values = torch.arange(5000.0).view(500, 10)
    table = table_of(values, Placement.MAPPED, torch.float64, CPU)
    rows = np.array([[3, 4], [7, 1]])
    table.expect(rows)
    assert torch.equal(table.fetch(rows)(), values[torch.from_numpy(rows)].flatten(1).double())
    assert taken == []  # the hints still wait, the rows are there
    gate.set()
    ahead._pool.shutdown()
    assert sorted(taken) == list(range(16))
