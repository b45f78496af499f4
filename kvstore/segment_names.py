"""Which files of a folder are segments: six digits in the name, and nothing else."""

from __future__ import annotations

import logging
import os
import re
from pathlib import Path

log = logging.getLogger(__name__)
MAX_SEGMENTS = 1_000_000  # six digits in a name
_NAME = re.compile(r"segment-[0-9]{6}\.seg")


def segment_name(number: int) -> str:
    return f"segment-{number:06d}.seg"


def segment_paths(folder: Path) -> list[Path]:
    """The files of a folder that are named as a store names its segments, by number; none for a
    folder that is not there. Others that look alike (`segment-1.seg`) are nobody's: one warning.
    Raises `OSError` for a folder that cannot be read."""
    if not folder.is_dir():
        return []
    alike = [name for name in os.listdir(folder) if name.startswith("segment-")]
    ours = sorted(name for name in alike if _NAME.fullmatch(name))
    if strangers := sorted(set(alike) - set(ours)):
        log.warning(
            "%s: left alone %s%s: a segment is named like %s",
            folder,
            ", ".join(strangers[:3]),
            f" and {len(strangers) - 3} more" if len(strangers) > 3 else "",
            segment_name(1),
        )
    return [folder / name for name in ours]
