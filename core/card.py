"""What a replica says of itself: the facts of its model, and its membership record."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

import msgpack

from headrace.core.chain import Namespace
from headrace.core.errors import WireError
from headrace.core.ids import BootId
from headrace.core.images import ImageGeometry
from headrace.core.rows import Geometry
from headrace.core.states import ReplicaState
from headrace.core.wire import pack_record, unpack_record


class Role(StrEnum):
    STORE = "store"
    VISION = "vision"
    PREFILL = "prefill"
    DECODE = "decode"
    ROUTER = "router"
    SUPERVISOR = "supervisor"


@dataclass(frozen=True, slots=True)
class ModelCard:
    """Facts of the served model that rooms without torch need. Equal on all replicas of a cluster.

    Roles with another `layout_id` or namespace are refused when they pair up."""

    name: str
    weights: str
    layout_id: bytes
    numerics: str  # namespace's numerics class, e.g. "invariant-fp64" or "fast-fp32"
    vocab_size: int
    max_position_tokens: int
    window_tokens: int
    n_encoder_layers: int
    n_decoder_layers: int
    block_bytes: int
    window_record_bytes: int
    bos_token_id: int
    eos_token_id: int
    image_token_id: int
    state_bytes: int = 0  # largest object of hand-off mode `state`

    @property
    def geometry(self) -> Geometry:
        return Geometry(self.window_tokens, self.n_encoder_layers, self.n_decoder_layers)

    def namespace(self, exactness: str = "exact") -> Namespace:
        """The store namespace of this model for one exactness class."""
        return Namespace(self.name, self.weights, self.layout_id, self.numerics, exactness)


@dataclass(frozen=True, slots=True)
class VisionCard:
    """What a vision replica's rows depend on beside the picture, and what rows one becomes.

    `preprocessing` and `tower` enter the key of every `mm` object (`core.images.image_digest`)."""

    preprocessing: str
    tower: str
    geometry: ImageGeometry


@dataclass(frozen=True, slots=True)
class Member:
    """A leased membership record. `boot_id` changes with every start of the process."""

    role: Role
    name: str
    boot_id: BootId
    address: str
    pid: int
    build: str
    state: ReplicaState
    card: ModelCard | None  # engines only
    max_rows_per_step: int
    n_blocks: int
    n_slots: int
    vision: VisionCard | None = None  # vision replicas only

    def encode(self) -> bytes:
        """msgpack bytes, as stored in the membership."""
        return bytes(msgpack.packb(pack_record(self), use_bin_type=True))

    @staticmethod
    def decode(data: bytes) -> Member:
        """Raises `WireError` on bytes that are no record of this version."""
        try:
            values = msgpack.unpackb(data, raw=False, max_ext_len=0, max_map_len=0)
        except (ValueError, msgpack.exceptions.UnpackException) as error:
            raise WireError(f"not a member record: {type(error).__name__}") from None
        return unpack_record(Member, values)
