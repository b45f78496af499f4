"""Every file operation of the store: the one layer between segments and the operating system.

Blocking; called from I/O threads and at start. Tests put failing, short or forgetful layers in
place of `FileCalls`, so nothing in this room calls `os` for a segment file by itself.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import shutil
from pathlib import Path

from headrace.core.errors import ConfigError
from headrace.kvstore.layout import ALIGN_BYTES, Buffer

LOCK_NAME = "lock"


class FileCalls:
    """The system calls on the files of one store. All raise `OSError`, and no other error.

    A file opened with `direct` passes the page cache by: memory, offset and length of every
    transfer must be multiples of `ALIGN_BYTES` (`aligned_buffer` makes such memory)."""

    def open(
        self, path: Path, *, create: bool = False, direct: bool = False, read_only: bool = False
    ) -> int:
        """A descriptor, closed with `close`. `direct` raises EINVAL where the file system has
        no such thing (tmpfs)."""
        flags = os.O_CLOEXEC | (os.O_RDONLY if read_only else os.O_RDWR)
        if create:
            flags |= os.O_CREAT
        if direct:
            flags |= os.O_DIRECT
        return os.open(path, flags, 0o600)

    def close(self, descriptor: int) -> None:
        os.close(descriptor)

    def size_bytes(self, descriptor: int) -> int:
        return os.fstat(descriptor).st_size

    def allocate(self, descriptor: int, size_bytes: int) -> None:
        """Take the space of the first `size_bytes`; what is there stays."""
        os.posix_fallocate(descriptor, 0, size_bytes)

    def truncate(self, descriptor: int, size_bytes: int) -> None:
        os.ftruncate(descriptor, size_bytes)

    def pwrite(self, descriptor: int, data: Buffer, offset: int) -> int:
        """How many bytes were written: fewer than asked is no error."""
        return os.pwrite(descriptor, data, offset)

    def pwritev(self, descriptor: int, buffers: list[Buffer], offset: int) -> int:
        """As `pwrite`, from several buffers in a row."""
        return os.pwritev(descriptor, buffers, offset)

    def preadv(self, descriptor: int, buffers: list[memoryview], offset: int) -> int:
        """How many bytes were read: fewer than asked is no error, 0 the end of the file."""
        return os.preadv(descriptor, buffers, offset)

    def sync(self, descriptor: int) -> None:
        """Return when everything written to this file is durable, through whichever descriptor."""
        os.fdatasync(descriptor)

    def sync_folder(self, folder: Path) -> None:
        """Make names in `folder` durable: files that were made, renamed or removed there."""
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def rename(self, source: Path, target: Path) -> None:
        """`target` is the old file or the new one at any moment."""
        os.replace(source, target)

    def unlink(self, path: Path) -> None:
        os.unlink(path)

    def lock(self, descriptor: int) -> bool:
        """Whether the file's lock is this descriptor's now; it ends with the descriptor."""
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def free_bytes(self, folder: Path) -> int:
        return shutil.disk_usage(folder).free


def write_all(
    calls: FileCalls, descriptor: int, data: Buffer, offset: int, *, direct: bool = False
) -> None:
    """Write all of `data`, in as many writes as it takes. Raises `OSError`.

    After a short write to a `direct` file the next one begins at a whole `ALIGN_BYTES` again."""
    view = memoryview(data).cast("B")
    while view:
        written = calls.pwrite(descriptor, view, offset)
        if direct and written < len(view):
            written -= written % ALIGN_BYTES
        if written <= 0:
            raise OSError("a write took nothing")
        view, offset = view[written:], offset + written


def read_all(
    calls: FileCalls, descriptor: int, dest: memoryview, offset: int, *, direct: bool = False
) -> bool:
    """Fill `dest`; False where the file ends before. Raises `OSError`."""
    while dest:
        got = calls.preadv(descriptor, [dest], offset)
        if direct and got < len(dest):
            got -= got % ALIGN_BYTES
        if got <= 0:
            return False
        dest, offset = dest[got:], offset + got
    return True


def aligned_buffer(size_bytes: int) -> memoryview:
    """Zeroed private memory of at least one byte that begins at a multiple of `ALIGN_BYTES`, for
    transfers of `direct` files. Freed with its last view."""
    return memoryview(mmap.mmap(-1, size_bytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))


def lock_directory(directory: str, calls: FileCalls | None = None) -> int:
    """Take the directory for this process: a descriptor, whose closing (or the process's end) gives
    it back. Raises `ConfigError` naming the owner when there is one."""
    calls = calls or FileCalls()
    folder = Path(directory)
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    descriptor = calls.open(folder / LOCK_NAME, create=True)
    if not calls.lock(descriptor):
        owner = os.pread(descriptor, 32, 0).decode("ascii", "replace").strip()
        calls.close(descriptor)
        raise ConfigError(f"directory: one store process may own it, process {owner or '?'} does")
    calls.truncate(descriptor, 0)
    calls.pwrite(descriptor, str(os.getpid()).encode(), 0)
    return descriptor


def taken_bytes(path: Path) -> int:
    """Space that a file really has: a sparse one has still to take it. 0 when there is none."""
    try:
        found = path.stat()
    except FileNotFoundError:
        return 0
    return min(found.st_size, found.st_blocks * 512)
