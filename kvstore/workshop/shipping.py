"""Prefix files: stored chains as one file that can be carried to another store.

    header, 4096 bytes | object, object, ... | trailer, 24 bytes          (docs/kv-format.md)
    object: the 512-byte header of a slot, then the payload

Everything is checked before anything is used: version, trailer, every header and checksum, and that
each block's parent comes before it. A file proves that its bytes are what was exported, not that
whoever wrote it computed them honestly: import files as you would load weights.
"""

from __future__ import annotations

import os
import stat
import struct
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import xxhash

from headrace.core.errors import HeadraceError
from headrace.kvstore.layout import HEADER_BYTES, SlotHeader, checksum
from headrace.kvstore.records import ARENA_SEGMENT
from headrace.kvstore.salts import SALT_BYTES, salt_mark
from headrace.kvstore.segment_names import segment_paths
from headrace.kvstore.settings import Kind

VERSION = 1
FILE_HEADER_BYTES = 4096
MAX_OBJECT_BYTES = 1 << 30
# magic | version | flags | header bytes | objects | payload bytes | written at | namespace | mark
_HEADER = struct.Struct("<4sHHIQQQ32s32s")
_MAGIC = b"HRPX"
_TRAILER = struct.Struct("<4sIQQ")  # magic | 0 | objects | xxh3-64 of everything before
_TRAILER_MAGIC = b"HRPE"
_SUM = struct.Struct("<Q")
_CHUNK_BYTES = 1 << 20
Progress = Callable[[int, int], None]


class FileRefused(HeadraceError):
    """A prefix file that cannot be used, and why."""

    code = "prefix_file_refused"


@dataclass(frozen=True, slots=True)
class PrefixFile:
    """What the header of a prefix file says. `mark` tells salts apart without telling a salt."""

    objects: int
    payload_bytes: int
    written_at_s: int
    namespace: bytes
    mark: bytes


def mark_of(directory: Path) -> bytes:
    """The mark of a store's salt. Digests of blocks begin with the salt of their cache domain, so a
    chain from a store with another salt would never be found: marks must be equal. Raises
    `FileRefused` when there is no whole salt."""
    try:
        salt = (directory / "salt").read_bytes()
    except OSError as error:
        raise FileRefused(f"{directory / 'salt'} cannot be read ({error.strerror})") from None
    if len(salt) != SALT_BYTES:
        raise FileRefused(f"{directory / 'salt'} must hold {SALT_BYTES} bytes, has {len(salt)}")
    return salt_mark(salt)


def write_file(
    path: Path,
    objects: Iterable[tuple[SlotHeader, bytes | bytearray | memoryview]],
    about: PrefixFile,
    progress: Progress,
    *,
    force: bool = False,
) -> None:
    """Write a prefix file (mode 600), whole or not at all. `objects` come heads before tails, as
    many as `about` says. Raises `OSError`, and `FileRefused` when the count is another or
    `check_target` refuses."""
    check_target(path, force=force)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    total = xxhash.xxh3_64()
    done = 0
    try:
        with open(temporary, "xb", opener=_private) as out:

            def put(data: bytes | bytearray | memoryview) -> None:
                total.update(data)
                out.write(data)

            put(_pack_header(about))
            for header, payload in objects:
                done += 1
                plain = header._replace(segment=ARENA_SEGMENT, slot=done - 1, generation=0)
                put(plain.pack())
                put(payload)
                progress(done, about.objects)
            if done != about.objects:
                raise FileRefused(f"{about.objects} objects were announced, {done} came")
            out.write(_TRAILER.pack(_TRAILER_MAGIC, 0, done, total.intdigest()))
            out.flush()
            os.fsync(out.fileno())
        check_target(path, force=force)  # writing takes minutes
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def check_target(path: Path, *, force: bool) -> None:
    """Refuse to write a prefix file over what is none: raises `FileRefused` inside a store's
    directory, for anything but a regular file, and, without `force`, for a file that is there."""
    folder = path.parent.resolve()
    for above in (folder, *folder.parents):
        if is_store(above):
            raise FileRefused(
                f"{path} lies in the store {above}, whose files it could replace: export to a"
                " folder outside of it"
            )
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISREG(mode):
        raise FileRefused(f"{path} is there and no regular file: export to another name")
    if not force:
        raise FileRefused(f"{path} is there; --force replaces it")


def is_store(folder: Path) -> bool:
    """Whether a folder has files of a store in it."""
    try:
        return bool(segment_paths(folder))
    except OSError:
        return False  # not ours to read, so no store of ours


def _private(name: str, flags: int) -> int:
    return os.open(name, flags, 0o600)  # stored prompts are in it


def read_header(path: Path) -> PrefixFile:
    """The header of a prefix file. Raises `FileRefused` naming what is wrong."""
    with _opened(path) as source:
        return _read_header(source, path)


def verify_file(path: Path, progress: Progress) -> PrefixFile:
    """Read a whole file and check everything in it. Raises `FileRefused` naming object and flaw."""
    about = read_header(path)
    seen: set[bytes] = set()
    roots: set[bytes] = set()
    payload_bytes = 0
    for number, (header, payload) in enumerate(read_objects(path)):
        facts = header.facts
        where = f"{path.name}, object {number}"
        if facts.namespace != about.namespace:
            raise FileRefused(f"{where}: is in another namespace than the file")
        if checksum(payload) != header.checksum:
            raise FileRefused(f"{where}: the payload does not match its checksum")
        if facts.kind is Kind.KV and not facts.block:
            roots.add(facts.parent)
        elif facts.kind in (Kind.KV, Kind.SWA) and facts.parent not in seen:
            raise FileRefused(f"{where}: comes before the block that it hangs on")
        seen.add(facts.digest)
        payload_bytes += len(payload)
        progress(number + 1, about.objects)
    if payload_bytes != about.payload_bytes:
        raise FileRefused(
            f"{path.name}: {about.payload_bytes} bytes were announced, {payload_bytes} are there"
        )
    _check_trailer(path, about)
    return about


def read_objects(path: Path) -> Iterator[tuple[SlotHeader, bytes]]:
    """The objects of a file in their order, payloads not verified. Raises `FileRefused`."""
    with _opened(path) as source:
        about = _read_header(source, path)
        for number in range(about.objects):
            header = SlotHeader.unpack(source.read(HEADER_BYTES))
            if header is None or header.slot != number or header.segment != ARENA_SEGMENT:
                raise FileRefused(f"{path.name}, object {number}: has no sound header")
            size = header.facts.payload_bytes
            if not 0 < size <= MAX_OBJECT_BYTES:
                raise FileRefused(
                    f"{path.name}, object {number}: payload_bytes must lie between 1 and"
                    f" {MAX_OBJECT_BYTES}, got {size}"
                )
            payload = source.read(size)
            if len(payload) != size:
                raise FileRefused(f"{path.name}, object {number}: the file ends in its payload")
            yield header, payload


def sizes_of(path: Path) -> dict[Kind, int]:
    """Payload bytes of the blocks and of the window records of a verified file. Raises
    `FileRefused` for other kinds, and unless all of a kind have one size, as in every store."""
    sizes: dict[Kind, int] = {}
    with _opened(path) as source:
        about = _read_header(source, path)
        for number in range(about.objects):
            header = SlotHeader.unpack(source.read(HEADER_BYTES))
            if header is None:
                raise FileRefused(f"{path.name}, object {number}: has no sound header")
            kind, size = header.facts.kind, header.facts.payload_bytes
            where = f"{path.name}, object {number}: is of kind {kind.value}"
            if kind not in (Kind.KV, Kind.SWA):
                raise FileRefused(f"{where}, a prefix file holds kv and swa")
            if sizes.setdefault(kind, size) != size:
                raise FileRefused(f"{where} and has {size} bytes, those before {sizes[kind]}")
            source.seek(size, os.SEEK_CUR)
    return sizes


def _pack_header(about: PrefixFile) -> bytes:
    body = _HEADER.pack(
        _MAGIC,
        VERSION,
        0,
        FILE_HEADER_BYTES,
        about.objects,
        about.payload_bytes,
        about.written_at_s,
        about.namespace,
        about.mark,
    ).ljust(FILE_HEADER_BYTES - _SUM.size, b"\0")
    return body + _SUM.pack(checksum(body))


def _read_header(source: BinaryIO, path: Path) -> PrefixFile:
    data = source.read(FILE_HEADER_BYTES)
    if data[:4] != _MAGIC:
        raise FileRefused(f"{path.name} is no prefix file: it does not begin with HRPX")
    if len(data) != FILE_HEADER_BYTES:
        raise FileRefused(f"{path.name} ends in its header")
    version = int.from_bytes(data[4:6], "little")
    if version != VERSION:
        raise FileRefused(
            f"{path.name} has format version {version}, this build reads {VERSION}: export it anew"
        )
    body = data[: -_SUM.size]
    if _SUM.unpack(data[-_SUM.size :])[0] != checksum(body):
        raise FileRefused(f"{path.name}: the header does not match its checksum")
    _, _, flags, size, *fields = _HEADER.unpack_from(body)
    if flags or size != FILE_HEADER_BYTES:
        raise FileRefused(f"{path.name}: the header has flags that this build does not know")
    return PrefixFile(*fields)


def _check_trailer(path: Path, about: PrefixFile) -> None:
    end = FILE_HEADER_BYTES + about.objects * HEADER_BYTES + about.payload_bytes
    if path.stat().st_size != end + _TRAILER.size:
        raise FileRefused(
            f"{path.name} must have {end + _TRAILER.size} bytes, has {path.stat().st_size}"
        )
    total = xxhash.xxh3_64()
    with _opened(path) as source:
        left = end
        while left:
            data = source.read(min(_CHUNK_BYTES, left))
            total.update(data)
            left -= len(data)
        trailer = _TRAILER.unpack(source.read(_TRAILER.size))
    if trailer != (_TRAILER_MAGIC, 0, about.objects, total.intdigest()):
        raise FileRefused(f"{path.name}: the trailer does not match what comes before it")


def _opened(path: Path) -> BinaryIO:
    try:
        return open(path, "rb")
    except OSError as error:
        raise FileRefused(f"{path} cannot be read ({error.strerror})") from None
