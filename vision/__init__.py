"""Vision role: turns pictures into rows that prefill and decode take as input.

A file's header decides how many rows it becomes and is read by the router (`core.images`); pixels
are opened in this room and nowhere else. `prepare` decodes, converts, resizes and pads under
rules that are part of every key (`PREPROCESSING_VERSION`); `ImageEncoder` runs the model room's
tower and gives the payload of an `mm` object. `run_vision` is the replica around it: a `VisionJob`
is answered when its object is sealed in the store and leased for the job, made now or earlier.
Begin at `role.py`; a job's states are a table in `jobs.py`.

This room may import `core`, `model` and `kvstore`, and neither `engine` nor the other roles.
"""

from headrace.vision.encode import EncodedImage, ImageEncoder, largest_payload_bytes
from headrace.vision.preprocess import PREPROCESSING_VERSION, PreparedImage, prepare
from headrace.vision.role import VisionReplica, run_vision
from headrace.vision.settings import VisionSettings

__all__ = [
    "PREPROCESSING_VERSION",
    "EncodedImage",
    "ImageEncoder",
    "PreparedImage",
    "VisionReplica",
    "VisionSettings",
    "largest_payload_bytes",
    "prepare",
    "run_vision",
]
