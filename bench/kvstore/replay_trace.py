"""Hit rate against cache size, replaying a request trace through the store's own policy objects.

    .venv/bin/python bench/kvstore/replay_trace.py TRACE.jsonl [--blocks 8000 32000] [--image PNG]

TRACE has one JSON object a line with `input_length` (tokens) and `hash_ids` (chained ids of blocks
of 512 tokens; equal ids mean equal prefixes up to there), as Mooncake's published traces have. No
bytes move: what is counted is decided by `kvstore.order` (the arena) and by `kvstore.disks` and
`kvstore.eviction` (segments), which a running store decides by too. A request's hit is its longest
leading run of blocks that are there; the rate is hit blocks by blocks asked for.

arena     the arena's order in front of a disk that remembers what left it, as a store's does
segments  a disk of --segments segments with second chances, nothing before it
lru, fifo one queue of blocks; of one request the tail goes first
ideal     Belady: what is asked for again last goes first, of one request the tail
"""

from __future__ import annotations

import argparse
import hashlib
import heapq
import json
import sys
import time
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from rich.console import Console
from rich.progress import track
from rich.table import Table

from headrace.core.clock import FakeClock
from headrace.core.ids import Digest
from headrace.core.states import Visibility
from headrace.kvstore.disks import DiskBook
from headrace.kvstore.kin import Kin
from headrace.kvstore.layout import NO_DIGEST, ObjectFacts, slot_bytes
from headrace.kvstore.objects import DiskPlace, Entry, Saving, object_key
from headrace.kvstore.order import LeaveOrder
from headrace.kvstore.policy import StorePolicy, allowances
from headrace.kvstore.settings import Kind

BLOCK_TOKENS = 128
ID_TOKENS = 512
FLASH_BLOCK_BYTES = 113_920
SIZES = (2_000, 4_000, 8_000, 16_000, 32_000, 64_000, 128_000)
Block = int
Request = Sequence[Block]  # complete blocks, from the root on


class Cache(Protocol):
    def open(self, blocks: Request) -> int:
        """How many leading blocks are there; they count as used by this request."""
        ...

    def put(self, blocks: Request, hit: int) -> None:
        """What the request computed: its blocks from `hit` on, some of which may be there."""
        ...


def read_trace(path: Path, limit: int | None = None) -> list[list[Block]]:
    """The requests of a trace as blocks of 128 tokens."""
    requests = []
    with open(path, encoding="utf-8") as lines:
        for line in lines:
            values = json.loads(line)
            n_blocks = int(values["input_length"]) // BLOCK_TOKENS
            part = ID_TOKENS // BLOCK_TOKENS
            ids = [id_ * part + at for id_ in values["hash_ids"] for at in range(part)]
            requests.append(ids[:n_blocks])
            if limit is not None and len(requests) >= limit:
                break
    return requests


class Queue:
    """LRU, or FIFO with `recency` False."""

    def __init__(self, blocks: int, *, recency: bool) -> None:
        self._room = blocks
        self._recency = recency
        self._queue: OrderedDict[Block, None] = OrderedDict()

    def open(self, blocks: Request) -> int:
        hit = leading(blocks, self._queue.__contains__)
        self._use(blocks[:hit])
        return hit

    def put(self, blocks: Request, hit: int) -> None:
        for block in blocks[hit:]:
            if block not in self._queue:
                if len(self._queue) >= self._room:
                    self._queue.popitem(last=False)
                self._queue[block] = None
        self._use(blocks)

    def _use(self, blocks: Request) -> None:
        if self._recency:
            for block in reversed(blocks):  # head last
                if block in self._queue:
                    self._queue.move_to_end(block)


class ArenaCache:
    """The arena: `LeaveOrder` with one group."""

    def __init__(self, blocks: int, policy: StorePolicy) -> None:
        self._room = blocks
        self._order: LeaveOrder[Block] = LeaveOrder(
            blocks, allowances((), blocks), policy.probation_share, FakeClock()
        )
        self._departures: dict[Block, int] = {}  # remembered by the disk behind it

    def open(self, blocks: Request) -> int:
        hit = leading(blocks, self._order.__contains__)
        for block in reversed(blocks[:hit]):
            self._order.use(block, again=True)
        return hit

    def put(self, blocks: Request, hit: int) -> None:
        order = self._order
        mine = []
        for block in blocks[hit:]:
            if block in order:
                order.use(block, again=True)
                continue
            if len(order) >= self._room:
                victim = order.victim(0)
                if victim is None:  # the request is larger than the arena
                    break
                order.leave(victim)
                self._departures[victim] = order.departures
            order.taken[0] += 1
            before = self._departures.get(block, 0)
            order.enter(block, 0, proven=order.left_lately(before))
            mine.append(block)
        for block in reversed(mine):  # its lease ends: tail first, head last
            order.allow(block)


class SegmentCache:
    """A disk: `DiskBook` and `plan_recycle` over segments that are reused oldest first."""

    def __init__(self, blocks: int, policy: StorePolicy, segments: int) -> None:
        self._slots = max(1, blocks // segments)
        self._disks = DiskBook(policy, 0, lambda domain: 0)
        self._kin = Kin()
        self._entries: dict[Block, Entry] = {}
        self._age: deque[int] = deque()
        self._free = deque(range(segments))
        self._left = 0
        self.written = 0
        self.moved = 0

    def open(self, blocks: Request) -> int:
        hit = leading(blocks, self._entries.__contains__)
        for block in blocks[:hit]:
            self._entries[block].touched = True
        return hit

    def put(self, blocks: Request, hit: int) -> None:
        for at in range(hit, len(blocks)):
            known = self._entries.get(blocks[at])
            if known is not None:
                known.touched = True
                continue
            if not self._left:
                self._reuse()
            self._write(self._entry(blocks, at))
            self.written += 1

    def _entry(self, blocks: Request, at: int) -> Entry:
        parent = _digest(blocks[at - 1]) if at else NO_DIGEST
        size = slot_bytes(FLASH_BLOCK_BYTES) - 4096
        facts = ObjectFacts(Kind.KV, bytes(32), _digest(blocks[at]), parent, at, bytes(16), size)
        key = object_key(Kind.KV, facts.namespace, facts.digest)
        made = Entry(key, facts, blocks[at], 0, Visibility.DURABLE, Saving.SAVED)
        self._entries[blocks[at]] = made
        self._kin.add(made)
        return made

    def _write(self, entry: Entry) -> None:
        self._left -= 1
        self._disks.put([(entry, DiskPlace(self._age[-1], 0, 1))])

    def _reuse(self) -> None:
        if self._free:
            self._begin(self._free.popleft())
            return
        segment = self._age.popleft()
        plan = self._disks.plan(segment, self._kin, self._slots, self._slots)
        assert plan is not None, "nothing is held here"
        for entry in plan.drop:
            self._disks.leave(entry)
            self._kin.discard(entry)
            del self._entries[entry.checksum]
        self._begin(segment)
        for entry in plan.keep:
            self._write(entry)
        self.moved += len(plan.keep)

    def _begin(self, segment: int) -> None:
        self._age.append(segment)
        self._left = self._slots


def _digest(block: Block) -> Digest:
    return Digest(hashlib.sha256(b"%d" % block).digest())


def leading(blocks: Request, there: Callable[[Block], bool]) -> int:
    """How many blocks from the first on are there."""
    for number, block in enumerate(blocks):
        if not there(block):
            return number
    return len(blocks)


def hit_rate(requests: Sequence[Request], cache: Cache) -> float:
    """Hit blocks by blocks asked for."""
    hits = asked = 0
    for blocks in requests:
        hit = cache.open(blocks)
        cache.put(blocks, hit)
        hits += hit
        asked += len(blocks)
    return hits / asked if asked else 0.0


def ideal_rate(requests: Sequence[Request], room: int) -> float:
    """Belady's rule with the future known; what is never asked for again is not kept."""
    times: dict[Block, deque[int]] = defaultdict(deque)
    for now, blocks in enumerate(requests):
        for block in blocks:
            times[block].append(now)
    kept: dict[Block, tuple[int, int]] = {}
    heap: list[tuple[int, int, Block]] = []
    hits = asked = 0
    for now, blocks in enumerate(requests):
        hits += leading(blocks, kept.__contains__)
        asked += len(blocks)
        for depth, block in enumerate(blocks):
            following = times[block]
            while following and following[0] <= now:
                following.popleft()
            kept.pop(block, None)
            if following:
                kept[block] = (-following[0], -depth)
                heapq.heappush(heap, (-following[0], -depth, block))
        while len(kept) > room:
            *rank, block = heapq.heappop(heap)
            if kept.get(block) == tuple(rank):
                del kept[block]
    return hits / asked if asked else 0.0


def replay(requests: Sequence[Request], room: int, segments: int) -> dict[str, float]:
    """Rates by policy at one size."""
    policy = StorePolicy()
    disk = SegmentCache(room, policy, segments)
    return {
        "blocks": room,
        "million_tokens": room * BLOCK_TOKENS / 1e6,
        "flash_gb": room * FLASH_BLOCK_BYTES / 1e9,
        "arena": hit_rate(requests, ArenaCache(room, policy)),
        "segments": hit_rate(requests, disk),
        "lru": hit_rate(requests, Queue(room, recency=True)),
        "fifo": hit_rate(requests, Queue(room, recency=False)),
        "ideal": ideal_rate(requests, room),
        "moved_share": disk.moved / max(1, disk.moved + disk.written),
    }


def show(rows: Sequence[dict[str, float]]) -> Table:
    table = Table(title="hit rate, % of blocks asked for")
    table.add_column("blocks", justify="right")
    table.add_column("M tokens", justify="right")
    table.add_column("GB (Flash)", justify="right")
    for name in ("arena", "segments", "lru", "fifo", "ideal", "moved of written"):
        table.add_column(name, justify="right")
    for row in rows:
        rates = ("arena", "segments", "lru", "fifo", "ideal", "moved_share")
        table.add_row(
            f"{row['blocks']:,}",
            f"{row['million_tokens']:.2f}",
            f"{row['flash_gb']:.2f}",
            *(f"{100 * row[name]:.1f}" for name in rates),
        )
    return table


def draw(rows: Sequence[dict[str, float]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axis = pyplot.subplots(figsize=(6.4, 3.8))
    sizes = [row["million_tokens"] for row in rows]
    styles = {"ideal": "k--", "arena": "o-", "segments": "s-", "lru": "^:", "fifo": "v:"}
    for name, style in styles.items():
        axis.plot(sizes, [100 * row[name] for row in rows], style, label=name, markersize=4)
    axis.set_xscale("log")
    axis.set_xticks(sizes, [f"{size:.3g}" for size in sizes])
    axis.minorticks_off()
    axis.set_xlabel("cache size, million tokens")
    axis.set_ylabel("hit rate, %")
    axis.set_ylim(bottom=0)
    axis.grid(alpha=0.3)
    axis.legend()
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("trace", type=Path)
    parser.add_argument("--blocks", type=int, nargs="+", default=list(SIZES), help="cache sizes")
    parser.add_argument("--segments", type=int, default=32)
    parser.add_argument("--requests", type=int, help="replay only so many")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--image", type=Path, help="draw the curves into this PNG")
    options = parser.parse_args()
    requests = read_trace(options.trace, options.requests)
    asked = sum(len(blocks) for blocks in requests)
    unique = len({block for blocks in requests for block in blocks})
    begun_s = time.monotonic()
    rows = [
        replay(requests, room, options.segments)
        for room in track(options.blocks, "sizes", console=Console(stderr=True))
    ]
    if options.json:
        json.dump(
            {"requests": len(requests), "asked": asked, "unique": unique, "rows": rows}, sys.stdout
        )
    else:
        out = Console(width=110)
        out.print(
            f"{len(requests)} requests, {asked:,} blocks asked for, {unique:,} of them unique"
        )
        out.print(show(rows))
        out.print(f"replayed in {time.monotonic() - begun_s:.0f} s")
    if options.image:
        draw(rows, options.image)


if __name__ == "__main__":
    main()
