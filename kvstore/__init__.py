"""kvstore: persists and finds 128-token-aligned KV and window state; bytes in, bytes out.

One store process a host owns the arena (shared memory) and the segment files (`run_store`); roles
reach it with a `StoreClient`, routers ask the Redis index with an `IndexReader`. Membership
(`MemberBoard`, `Beat`), the salts of cache domains (`SaltBook`) and the embedded Valkey live here
too, because no other room may import redis. A store may miss, it never lies: what `read_into`
answers True for are exactly the bytes that were put under that digest.
A digest is always the object's own: for a window record `core.chain.window_digest(block_digest)`,
except in `StoreClient.open_windows`, whose candidates are block digests. No torch in this room.
"""

from headrace.kvstore.arena import plan_regions
from headrace.kvstore.classes import ClassStores
from headrace.kvstore.client import StoreClient
from headrace.kvstore.embedded import EmbeddedRedis, embedded_valkey
from headrace.kvstore.index import Hits, IndexReader
from headrace.kvstore.members import Beat, MemberBoard
from headrace.kvstore.reading import read_objects
from headrace.kvstore.salts import SaltBook
from headrace.kvstore.server import run_store
from headrace.kvstore.settings import Kind, StoreSettings, StoreStat, Tier

__all__ = [
    "Beat",
    "ClassStores",
    "EmbeddedRedis",
    "Hits",
    "IndexReader",
    "Kind",
    "MemberBoard",
    "SaltBook",
    "StoreClient",
    "StoreSettings",
    "StoreStat",
    "Tier",
    "embedded_valkey",
    "plan_regions",
    "read_objects",
    "run_store",
]
