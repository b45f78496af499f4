"""What the index holds: keys, the 40-byte record, and the record of a live store.

    {kind}:{first 8 bytes of the namespace}:{first 16 bytes of the object's digest}   n x 40 bytes
    kv:store:{number}                                                   live store, PX lease
    claim:{kind}:...                                                    who persists an object, PX
    store:folder:{epoch of tier shared}                                 somebody reads it, PX
    store:numbers                                       sorted set: numbers in use, by time

A value is the records of all places of one object, joined; a store replaces its own and touches no
other's. A record counts only while its store's live record carries the same boot epoch.
"""

from __future__ import annotations

import struct
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace

import numpy as np

from headrace.core.ids import DIGEST_BYTES, Digest
from headrace.kvstore.settings import Kind, Tier

# store u16 | tier u8 | kind u8 | boot epoch u32 | segment u32 | slot u32 | generation u32 |
# payload length u32 | checksum u64 | written at u32 | tail of digest u32
RECORD = struct.Struct("<HBBIIIIIQII")
RECORD_BYTES = RECORD.size
assert RECORD_BYTES == 40, "the record is 40 bytes: docs/kv-format.md"

ARENA_SEGMENT = 0xFFFF_FFFF  # stands for "in the arena" where a segment number is expected
KIND_CODES: dict[Kind, int] = {Kind.KV: 1, Kind.SWA: 2, Kind.MM: 3, Kind.STATE: 4}
KINDS_BY_CODE = {code: kind for kind, code in KIND_CODES.items()}
TIER_CODES: dict[Tier, int] = {Tier.HOST: 1, Tier.SSD: 2, Tier.SHARED: 3}
TIERS_BY_CODE = {code: tier for tier, code in TIER_CODES.items()}
# In the kind of a block's record: the store also has the window record at the end of this block. A
# look-up of a chain then asks for those few windows instead of one a block.
WINDOW_TOO = 0x80
RECORDS = np.dtype([("head", "<u8"), ("place", "V28"), ("tail", "<u4")])
HEAD = struct.Struct("<HBBI")  # store | tier | kind | boot epoch
assert RECORDS.itemsize == RECORD_BYTES, "RECORDS is RECORD, for whole chains at once"
_NAME_STARTS = {code: kind.value.encode() + b":" for kind, code in KIND_CODES.items()}
_NO_TIER: frozenset[Tier] = frozenset()
_SHARED_CODE = TIER_CODES[Tier.SHARED]
_ONE_TIER = {code: frozenset((tier,)) for tier, code in TIER_CODES.items()}

_LIVE = struct.Struct("<IQ8s")  # boot epoch | beat | store uid; then the address
_ADDRESS_BYTES = 256


# Compare-and-delete. KEYS: objects; ARGV[i]: a record, taken out of KEYS[i] where it stands
# unchanged. 1 for each that was.
FORGET = """
local took = {}
for i, key in ipairs(KEYS) do
  local value = redis.pcall('GET', key)
  if type(value) ~= 'string' or #value % 40 ~= 0 then value = '' end
  local kept = ''
  for at = 1, #value, 40 do
    local record = string.sub(value, at, at + 39)
    if record ~= ARGV[i] then kept = kept .. record end
  end
  took[i] = #kept ~= #value and 1 or 0
  if took[i] == 1 then
    if kept == '' then redis.call('DEL', key) else redis.call('SET', key, kept) end
  end
end
return took
"""


# Claim objects: KEYS claims, ARGV: uid, PX. 1 for each that is ours: now, by an earlier claim,
# perhaps of an earlier life, or because the key is of another type.
CLAIM = """
local ours = {}
for i, key in ipairs(KEYS) do
  local value = redis.pcall('SET', key, ARGV[1], 'NX', 'GET', 'PX', ARGV[2])
  ours[i] = (type(value) ~= 'string' or value == ARGV[1]) and 1 or 0
end
return ours
"""


# Claim or renew a store number: KEYS[1] its key, ARGV: uid, live record, PX. Returns the record
# that stood there ('' when none), or nil when another store has the number.
BEAT = """
local value = redis.pcall('GET', KEYS[1])
if type(value) ~= 'string' then value = '' end
if #value >= 20 and string.sub(value, 13, 20) ~= ARGV[1] then return nil end
redis.call('SET', KEYS[1], ARGV[2], 'PX', ARGV[3])
return value
"""


@dataclass(frozen=True, slots=True)
class IndexRecord:
    """One place of one object, as other processes see it."""

    store: int
    tier: Tier
    kind: Kind
    epoch: int
    segment: int
    slot: int
    generation: int
    payload_bytes: int
    checksum: int
    written_at_s: int
    digest_tail: int
    window_too: bool = False  # of a block: the window record at its end is in this store too

    def pack(self) -> bytes:
        return RECORD.pack(
            self.store,
            TIER_CODES[self.tier],
            KIND_CODES[self.kind] | (WINDOW_TOO if self.window_too else 0),
            self.epoch,
            self.segment,
            self.slot,
            self.generation,
            self.payload_bytes,
            self.checksum,
            self.written_at_s & 0xFFFF_FFFF,
            self.digest_tail,
        )


def unpack_records(value: bytes) -> tuple[IndexRecord, ...]:
    """The records joined in `value`; what is no whole number of known records gives none."""
    if not value or len(value) % RECORD_BYTES:
        return ()
    out = []
    for fields in RECORD.iter_unpack(value):
        tier, kind = TIERS_BY_CODE.get(fields[1]), KINDS_BY_CODE.get(fields[2] & ~WINDOW_TOO)
        if tier is None or kind is None:
            return ()
        record = IndexRecord(fields[0], tier, kind, *fields[3:])
        out.append(replace(record, window_too=True) if fields[2] & WINDOW_TOO else record)
    return tuple(out)


def cut_records(value: bytes) -> list[bytes]:
    """The records joined in `value`, as bytes; none where that is no whole number of them."""
    if len(value) % RECORD_BYTES:
        return []
    return [value[at : at + RECORD_BYTES] for at in range(0, len(value), RECORD_BYTES)]


def digest_tail(digest: bytes) -> int:
    """The last four bytes of a digest; with the 16 in the key, 20 of 32 are compared here and all
    32 where the bytes are read."""
    return int.from_bytes(digest[28:32], "little")


def record_key(kind: Kind, namespace: bytes, digest: bytes) -> bytes:
    return kind.value.encode() + b":" + namespace[:8] + b":" + digest[:16]


def packed_key(key: bytes) -> bytes:
    """One key as Redis's protocol sends it."""
    return b"$%d\r\n%s\r\n" % (len(key), key)


def packed_keys(kind: Kind, namespace: bytes, digests: bytes) -> bytes:
    """Keys of the objects whose digests are joined in `digests`, each as Redis's protocol sends it
    (length, key, line ends): a thousand cost 20 us."""
    before = kind.value.encode() + b":" + namespace[:8] + b":"
    head = b"$%d\r\n" % (len(before) + 16) + before
    row = np.frombuffer(head + bytes(16) + b"\r\n", np.uint8)
    count = len(digests) // DIGEST_BYTES
    rows = np.empty((count, len(row)), np.uint8)
    rows[:] = row
    rows[:, len(head) : len(head) + 16] = np.frombuffer(digests, np.uint8).reshape(
        count, DIGEST_BYTES
    )[:, :16]
    return rows.tobytes()


def record_name(key: bytes) -> bytes:
    """The `record_key` of an object by its key in the store's own table (`objects.object_key`)."""
    return _NAME_STARTS[key[0]] + key[1:9] + b":" + key[33:49]


def claim_name(key: bytes) -> bytes:
    """As `record_name`, of the claim on an object."""
    return b"claim:" + record_name(key)


def store_key(number: int) -> bytes:
    return b"kv:store:%d" % number


NUMBERS_KEY = b"store:numbers"


def folder_key(epoch: int) -> bytes:
    """There as long as a living store has the shared folder mounted whose records carry this."""
    return b"store:folder:%08x" % epoch


@dataclass(frozen=True, slots=True)
class LiveStore:
    """What a living store writes about itself with every beat. `beat` grows, so that a Redis which
    came back with older data is noticed: it does not return what was written last."""

    epoch: int
    beat: int
    uid: bytes  # 8 bytes, of the directory: a restart on it is the same store
    address: str = ""  # where other stores may ask it; empty: nowhere

    def pack(self) -> bytes:
        return _LIVE.pack(self.epoch, self.beat, self.uid) + self.address.encode("ascii")

    @staticmethod
    def unpack(value: bytes | None) -> LiveStore | None:
        if value is None or not _LIVE.size <= len(value) <= _LIVE.size + _ADDRESS_BYTES:
            return None
        epoch, beat, uid = _LIVE.unpack_from(value)
        address = value[_LIVE.size :]
        if address and not (address.startswith(b"tcp://") and address.isascii()):
            return None
        return LiveStore(epoch, beat, uid, address.decode("ascii"))


def usable_tiers(
    value: object,
    kind: Kind,
    digest: Digest,
    epochs: Mapping[int, int],
    folders: Collection[int],
) -> frozenset[Tier]:
    """Tiers in which `value` says the object lies, of stores that live with that boot epoch, and of
    shared folders that some living store reads."""
    if not isinstance(value, bytes) or not value or len(value) % RECORD_BYTES:
        return _NO_TIER
    tail, kind_code = digest_tail(digest), KIND_CODES[kind]
    found = _NO_TIER
    # Plain tuples: a look-up of a long prompt passes here thousands of times.
    for record in RECORD.iter_unpack(value):
        tier = _ONE_TIER.get(record[1])
        code = record[2] & ~WINDOW_TOO
        if tier is None or code not in KINDS_BY_CODE:
            return _NO_TIER
        if code != kind_code or record[10] != tail:
            continue
        if record[1] == _SHARED_CODE:
            alive = record[3] in folders
        else:
            alive = epochs.get(record[0]) == record[3]
        if alive:
            found |= tier
    return found


def store_numbers(values: Iterable[bytes | None]) -> list[int]:
    """The stores that any of these values names, in order."""
    numbers = {
        value[at : at + 2]
        for value in values
        if value and not len(value) % RECORD_BYTES
        for at in range(0, len(value), RECORD_BYTES)
    }
    return sorted(int.from_bytes(number, "little") for number in numbers)


def folder_epochs(values: Iterable[bytes | None]) -> list[int]:
    """The shared folders that any of these values names, in order."""
    return sorted(
        {
            record.epoch
            for value in values
            for record in unpack_records(value or b"")
            if record.tier is Tier.SHARED
        }
    )
