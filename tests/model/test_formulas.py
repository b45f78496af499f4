"""Starting later and still exact: write floor, window records, exact replay, decoder floor."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

G = 128
DECODED = 7  # single rows after the prompt


def floor_g(n: int) -> int:
    return n // G * G


@dataclass(frozen=True)
class Start:
    """Where a decode run of N tokens begins, given H stored tokens and window records at C."""

    start: int
    from_window: bool
    swa_floor: int
    decoder_from: int


def plan_start(n: int, hit: int, keep: int, windows: set[int], reach: int) -> Start:
    latest = max(0, min(hit, n - keep))
    c = max(x for x in windows | {0} if x <= latest)
    e = max(0, latest - reach) // 2 * 2
    start = max(c, e)
    from_window = start == c
    return Start(start, from_window, 0 if from_window else e, max(0, n - keep))


@pytest.fixture(scope="module")
def references(make_trunk, make_text, driver_type, part_type):
    """references(name, N, keep): the run from 0 of the same keep, cached.

    Returns (text, logits of the last prompt row and of the rows after it, driver).
    """
    cache = {}

    def get(name: str, n: int, keep: int):
        if (name, n, keep) not in cache:
            trunk = make_trunk(name)
            text = make_text(n + DECODED, n, trunk.config)
            driver = driver_type(trunk, n_blocks=8)
            at = max(0, n - keep)
            part = part_type(text, 0, n, 0, tuple(range(8)), decoder_from=at, decoder_floor=at)
            logits = [driver.call(part).logits, *decode(driver, part, part_type)]
            cache[name, n, keep] = (text, torch.cat(logits), driver)
        return cache[name, n, keep]

    return get


def decode(driver, part, part_type):
    """Logits of DECODED single rows after `part`."""
    rows = []
    for at in range(part.hi, part.hi + DECODED):
        step = {**part.__dict__, "lo": at, "hi": at + 1}
        rows.append(driver.call(part_type(**step)).logits)
    return rows


def prefill(driver, text, n: int, keep: int, part_type) -> tuple[int, bytes]:
    """Encoder-only rows to floor_g(n) in calls of at most 100 rows; the window record at p."""
    p, end = floor_g(max(0, n - keep)), floor_g(n)
    record, lo = b"", 0
    while lo < end:
        hi = min(end, lo + 100, p if lo < p else end)
        part = part_type(text, lo, hi, 1, tuple(range(8)), decoder_from=n + DECODED)
        result = driver.call(part)
        assert result.decoder_rows == 0 and result.logits.shape[0] == 0
        lo = hi
        if lo == p:
            record = driver.state.read_window(1, p)
    assert driver.encoder_rows == end
    return p, record


CASES = [
    # N, keep, H, with the window record?
    (33, 32, 0, False),
    (128, 32, 128, True),
    (129, 44, 128, False),
    (255, 32, 128, True),
    (300, 44, 256, True),
    (300, 44, 256, False),
    (384, 32, 384, True),
    (385, 64, 256, True),
    (385, 64, 128, False),
    (500, 187, 384, True),
    (500, 187, 384, False),
    (500, 32, 0, False),
]


@pytest.mark.parametrize(("n", "keep", "hit", "window"), CASES)
def test_start_is_exact(n, keep, hit, window, references, make_trunk, driver_type, part_type):
    text, logits, reference = references("t1", n, keep)
    trunk = make_trunk("t1")
    config = trunk.config
    store = driver_type(trunk, n_blocks=8)
    p, record = prefill(store, text, n, keep, part_type)
    if p:
        assert len(record) == store.layout.window_record_bytes == 6 * 31 * 66

    start = plan_start(n, hit, keep, {p} if window else set(), config.replay_reach_rows)
    driver = driver_type(trunk, n_blocks=12, backtrack_rows=8)  # another ring, other blocks
    table = (7, 3, 9, 0, 11)
    for b in range(hit // G):
        driver.state.write_block(table[b], store.state.read_block(b))
    if start.from_window and start.start:
        driver.state.write_window(2, start.start, record)
    part = part_type(
        text,
        start.start,
        n,
        slot=2,
        table=table,
        swa_floor=start.swa_floor,
        decoder_floor=start.decoder_from,
        decoder_from=start.decoder_from,
        write_floor=hit,
    )
    below = [driver.state.read_block(table[b]) for b in range(hit // G)]
    half = (n - start.start) // 2
    got = driver.run(part, [half, n - start.start - half] if half else None).logits
    assert driver.encoder_rows == n - start.start
    assert driver.decoder_rows == min(n, keep)
    if window and hit == floor_g(n):
        assert driver.encoder_rows <= max(n - hit, keep + G - 1)
    after = [driver.state.read_block(table[b]) for b in range(hit // G)]
    assert after == below  # nothing below the write floor was touched
    got = torch.cat([got, *decode(driver, part, part_type)])
    assert torch.equal(got, logits)
    for b in range((n + DECODED) // G):  # above the write floor: the bytes of the run from 0
        assert driver.state.read_block(table[b]) == reference.state.read_block(b)
    end = n + DECODED
    assert driver.state.read_window(2, end) == reference.state.read_window(0, end)


def test_t2_starts_from_a_window(references, make_trunk, driver_type, part_type):
    n, keep, hit = 300, 140, 256
    text, logits, reference = references("t2", n, keep)
    trunk = make_trunk("t2")
    store = driver_type(trunk, n_blocks=8)
    p, record = prefill(store, text, n, keep, part_type)
    start = plan_start(n, hit, keep, {p}, trunk.config.replay_reach_rows)
    assert p == start.start == 128 and start.from_window
    driver = driver_type(trunk, n_blocks=4)
    for b in range(2):
        driver.state.write_block(b, store.state.read_block(b))
    driver.state.write_window(0, p, record)
    floors = {"decoder_floor": 160, "decoder_from": 160, "write_floor": hit}
    part = part_type(text, p, n, 0, (0, 1, 2), **floors)
    got = torch.cat([driver.call(part).logits, *decode(driver, part, part_type)])
    assert torch.equal(got, logits)
    assert driver.state.read_window(0, 307) == reference.state.read_window(0, 307)


@pytest.mark.parametrize("n", [256, 300])
def test_exact_keep_equals_the_untruncated_run(n, references, make_trunk):
    keep = make_trunk("t1").config.exact_keep_tokens
    assert keep == 187
    assert torch.equal(references("t1", n, keep)[1], references("t1", n, n)[1])


def test_truncation_heals_when_wrong_rows_leave_the_window(
    make_trunk, make_text, driver_type, part_type
):
    """Only decoder windows are wrong: n_dec (W-1) rows after the decoder floor all is exact."""
    trunk = make_trunk("t1")
    n, keep = 60, 32
    exact_from = n - keep + trunk.config.n_decoder_layers * (trunk.config.sliding_window - 1)
    text = make_text(exact_from + 12, 4, trunk.config)
    drivers = []
    for floor in (n - keep, 0):
        driver = driver_type(trunk)
        part = part_type(text, 0, n, 0, (0, 1), decoder_from=floor, decoder_floor=floor)
        driver.call(part)
        for lo in range(n, exact_from, 77):
            hi = min(lo + 77, exact_from)
            driver.call(part_type(**{**part.__dict__, "lo": lo, "hi": hi}))
        end = {"lo": exact_from, "hi": exact_from + 12, "logits_from": exact_from}
        drivers.append(driver.call(part_type(**{**part.__dict__, **end})))
    assert drivers[0].logits.shape[0] == 12
    assert torch.equal(drivers[0].logits, drivers[1].logits)


def test_replay_rows_write_nothing_below_the_floor(make_trunk, make_text, driver_type, part_type):
    """An approximate replay differs above the floor, in no byte below it, and is repeatable."""
    trunk = make_trunk("t1")
    text = make_text(300, 6, trunk.config)
    cold = driver_type(trunk)
    cold.call(part_type(text, 0, 300, 0, (0, 1, 2)))
    results = []
    for splits in ([140], [3, 1, 36, 100]):
        driver = driver_type(trunk)
        for b in (0, 1):
            driver.state.write_block(b, cold.state.read_block(b))
        floors = {"swa_floor": 160, "decoder_floor": 256, "decoder_from": 256}
        part = part_type(text, 160, 300, 0, (0, 1, 2), write_floor=256, **floors)
        logits = driver.run(part, splits).logits
        assert driver.state.read_block(0) == cold.state.read_block(0)
        assert driver.state.read_block(1) == cold.state.read_block(1)
        results.append((logits, driver.state.read_block(2), driver.state.read_window(0, 300)))
    assert torch.equal(results[0][0], results[1][0]) and results[0][1:] == results[1][1:]
    assert results[0][1] != cold.state.read_block(2)
