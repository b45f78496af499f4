"""The arena is locked where the system lets it; what is refused is said and costs nothing else."""

from __future__ import annotations

import gc
import subprocess
import sys
from pathlib import Path

import pytest

from headrace.kvstore.arena import plan_regions

REFUSED = """
import logging, os, resource
from headrace.kvstore.arena import create_arena, Region
from headrace.kvstore.locking import lock_arena
from headrace.kvstore.settings import Kind
logging.basicConfig(format="%(message)s")
regions = (Region(Kind.KV, 0, 4096, 64),)
descriptor, arena = create_arena(regions)
resource.setrlimit(resource.RLIMIT_MEMLOCK, (8192, 8192))
if os.geteuid() == 0:
    os.seteuid(65534)  # root may lock what it likes
print(lock_arena(arena, True))
arena.view[:4] = b"used"
"""


def locked_bytes() -> int:
    text = Path("/proc/self/status").read_text("ascii")
    return 1024 * next(int(row.split()[1]) for row in text.splitlines() if row.startswith("VmLck"))


@pytest.mark.parametrize("wanted", [True, False])
async def test_what_the_store_says_of_its_memory_is_so(rig, things, wanted):
    gc.collect()  # arenas of earlier tests
    before = locked_bytes()
    await rig.start(lock_memory=wanted)
    client = await rig.client()
    size = max(region.end for region in plan_regions(rig.settings))
    said = (await client.stat()).arena_lock
    assert said in (("locked", "refused") if wanted else ("off",))
    assert locked_bytes() - before == (size if said == "locked" else 0)


def test_a_refusal_is_said_with_the_limit_and_the_memory_serves():
    done = subprocess.run(
        [sys.executable, "-P", "-c", REFUSED], check=True, capture_output=True, text=True
    )
    assert done.stdout.strip() == "refused"
    assert "262144 bytes may be swapped out" in done.stderr
    assert "RLIMIT_MEMLOCK is 8192 bytes" in done.stderr
