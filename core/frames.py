"""Frames: what surrounds a message on a socket.

    magic "HR" | version u8 | flags u8 (0) | length u32le | tag 16 bytes | payload (msgpack)

The tag is derived from the cluster token and compared in constant time *before* anything of the
payload is decoded; a length above the cap is refused before it is read. A bad frame ends its
connection.
"""

from __future__ import annotations

import hashlib
import hmac
import struct

from headrace.core.errors import WireError

MAGIC = b"HR"
VERSION = 1
TAG_BYTES = 16
_HEAD = struct.Struct("<2sBBI")
HEADER_BYTES = _HEAD.size + TAG_BYTES


def token_tag(cluster_token: str) -> bytes:
    """The tag every frame of a cluster carries."""
    return hashlib.sha256(b"headrace-frame" + cluster_token.encode()).digest()[:TAG_BYTES]


class FrameCodec:
    """Encodes frames and cuts a byte stream into them. One instance per direction."""

    def __init__(self, cluster_token: str, max_frame_bytes: int) -> None:
        self._tag = token_tag(cluster_token)
        self._max_frame_bytes = max_frame_bytes

    def encode(self, payload: bytes) -> bytes:
        """One frame. Raises `WireError` when the payload exceeds the cap."""
        if len(payload) > self._max_frame_bytes:
            raise WireError(f"a frame holds {self._max_frame_bytes} bytes, got {len(payload)}")
        return _HEAD.pack(MAGIC, VERSION, 0, len(payload)) + self._tag + payload

    @staticmethod
    def check_start(start: bytes) -> None:
        """Refuse what cannot become a frame by its first bytes, however few: raises `WireError`
        for a wrong magic or version."""
        if start[:2] != MAGIC[: len(start)]:
            raise WireError("not a frame")
        if len(start) > 2 and start[2] != VERSION:
            raise WireError(f"frame version {start[2]}, this build speaks {VERSION}")

    def payload_bytes(self, header: bytes) -> int:
        """Payload length announced by a frame header of `HEADER_BYTES` bytes.

        Raises `WireError` for a wrong magic, version, flag, token or an excessive length."""
        self.check_start(header)
        _, _, flags, length = _HEAD.unpack_from(header)
        if not hmac.compare_digest(header[_HEAD.size : HEADER_BYTES], self._tag):
            raise WireError("wrong cluster token")
        if flags:
            raise WireError(f"unknown frame flags {flags}")
        if length > self._max_frame_bytes:
            raise WireError(f"a frame holds {self._max_frame_bytes} bytes, {length} announced")
        return int(length)
