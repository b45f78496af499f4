"""Vision role: turns pictures into rows that prefill and decode take as input.

A file's header decides how many rows it becomes and is read by the router (`core.images`); pixels
are opened in this room and nowhere else. `prepare` decodes, converts, resizes and pads under
rules that are part of every key (`PREPROCESSING_VERSION`); `ImageEncoder` runs the model room's
tower and gives the payload of an `mm` object. The replica around it (socket, queue, store) is not
here yet: a deployment has no vision replicas, and the router refuses requests with images.

This room may import `core`, `model` and `kvstore`, and neither `engine` nor the other roles.
"""

from headrace.vision.encode import EncodedImage, ImageEncoder
from headrace.vision.preprocess import PREPROCESSING_VERSION, PreparedImage, prepare

__all__ = [
    "PREPROCESSING_VERSION",
    "EncodedImage",
    "ImageEncoder",
    "PreparedImage",
    "prepare",
]
