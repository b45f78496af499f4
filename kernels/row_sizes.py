"""What V4's rows weigh (`rope_rows`); no torch."""

ROPE_ROW_GROUP = 64
SCALES_ALIGNMENT = 8


def rope_row_scales(plain: int) -> int:
    """Scale bytes of a row with `plain` unrotated channels, the unused ones included."""
    used = plain // ROPE_ROW_GROUP
    return -(-used // SCALES_ALIGNMENT) * SCALES_ALIGNMENT
