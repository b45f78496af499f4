"""Pictures of a chat request: URLs in, files with headers and keys out.

Only headers are read here; pixels are opened by vision replicas alone. Nothing is fetched here: a
URL of a scheme that the deployment does not take is refused before its host is looked at, and what
stands behind other URLs is handed in (`router.fetch`).
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias
from urllib.parse import unquote_to_bytes

from headrace.core.card import VisionCard
from headrace.core.chain import TokenIds
from headrace.core.errors import InvalidRequest, LimitExceeded
from headrace.core.ids import Digest
from headrace.core.images import (
    ImageHeader,
    ImageLimits,
    ImageSpan,
    expand_placeholders,
    image_digest,
    read_header,
    resized_grid,
)
from headrace.router.jsonbody import Json, check_text

IMAGE_KINDS = frozenset({"image_url", "input_image", "image"})
DETAILS = (None, "auto", "high")  # one resolution is offered
_HEAD = re.compile(r"data:image/[a-z0-9.+-]{1,64}((?:;[a-z0-9=.+-]{1,64}){0,4});[ ]*base64,", re.I)
# What the protocol library is given instead of a picture: it needs to know of one, not its bytes.
_NO_SPACE = dict.fromkeys(map(ord, "\t\n\f\r "))
_STAND_IN = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}

Urls: TypeAlias = Sequence[tuple[str, str]]  # (place in the request, URL)
Schemes: TypeAlias = Sequence[str]  # of URLs that are taken; none: no pictures
DATA_ONLY: Schemes = ("data",)
WITH_FETCH: Schemes = ("data", "http", "https")


@dataclass(frozen=True, slots=True)
class PictureFile:
    """One picture as sent. `param` is its place in the request, for messages."""

    data: bytes
    header: ImageHeader
    param: str


@dataclass(frozen=True, slots=True)
class Placed:
    """A prompt with its pictures drawn out to rows, and the file behind each of the keys."""

    token_ids: TokenIds
    spans: tuple[ImageSpan, ...] = ()
    files: Mapping[Digest, PictureFile] | None = None


def read_image_part(part: Json, where: str, schemes: Schemes = DATA_ONLY) -> Json:
    """A checked `image_url` part. Raises `InvalidRequest`; no host is looked at."""
    if part.get("type") != "image_url":
        raise InvalidRequest(f"{where}.type must be image_url for an image", param=where)
    image = part.get("image_url")
    if set(part) != {"type", "image_url"} or not isinstance(image, dict):
        raise InvalidRequest(f"{where} must hold type and image_url", param=where)
    url, detail = image.get("url"), image.get("detail")
    if set(image) - {"url", "detail"} or not isinstance(url, str):
        raise InvalidRequest(f"{where}.image_url must hold url", param=where)
    if detail not in DETAILS or isinstance(detail, bool):
        raise InvalidRequest(f"{where}.image_url.detail must be auto or high", param=where)
    if url[:8].partition(":")[0].lower() not in schemes or ":" not in url[:8]:
        if "http" in schemes:
            wanted = "images are taken as data:, http: and https: URLs only"
        else:
            wanted = (
                "images are taken as data: URLs only; other URLs are not fetched, since"
                " router.fetch.hosts names no host"
            )
        raise InvalidRequest(wanted, param=where)
    check_text(url, where)
    return {"type": "image_url", "image_url": {"url": url}}


def take_urls(messages: Sequence[Json]) -> tuple[tuple[str, str], ...]:
    """The URLs of checked messages in order; each is replaced by a stand-in (mutates them)."""
    found: list[tuple[str, str]] = []
    for number, message in enumerate(messages):
        content = message["content"]
        if not isinstance(content, list):
            continue
        for place, part in enumerate(content):
            if part["type"] == "image_url":
                found.append((f"messages[{number}].content[{place}]", part["image_url"]["url"]))
                content[place] = _STAND_IN
    return tuple(found)


def count_images(messages: Sequence[Json]) -> int:
    """Image parts of checked messages."""
    contents = (message["content"] for message in messages)
    lists = (content for content in contents if isinstance(content, list))
    return sum(part["type"] == "image_url" for content in lists for part in content)


def open_files(
    urls: Urls, limits: ImageLimits, fetched: Mapping[str, bytes] | None = None
) -> tuple[PictureFile, ...]:
    """Files and headers behind URLs, within `limits`: those in `fetched`, and data URLs. O(bytes);
    may run in a thread.

    Raises `LimitExceeded` or `InvalidRequest` naming the place of the first bad one."""
    limits.check_count(len(urls))
    files = fetched or {}
    return tuple(
        PictureFile(data, read_header(data, limits, param=param), param)
        for param, url in urls
        for data in (files[url] if url in files else _decode(param, url, limits),)
    )


def _decode(param: str, url: str, limits: ImageLimits) -> bytes:
    """The bytes of a data URL: percent-encoding undone, then forgiving base64 (WHATWG Infra), in
    which ASCII whitespace counts for nothing and padding may be left out."""
    head = _HEAD.match(url)
    if head is None:
        raise InvalidRequest(
            "an image must be given as data:image/<type>;base64,<data>", param=param
        )
    data = url[head.end() :]
    if "%" in data:
        data = unquote_to_bytes(data).decode("latin-1")
    data = data.translate(_NO_SPACE).removesuffix("=").removesuffix("=")
    n_bytes = len(data) * 3 // 4
    if n_bytes > limits.file_bytes + 2:
        raise LimitExceeded(
            f"an image file is limited to {limits.file_bytes} bytes, got about {n_bytes}",
            param=param,
        )
    try:
        return base64.b64decode(data + "=" * (-len(data) % 4), validate=True)
    except (binascii.Error, ValueError):
        raise InvalidRequest("the image's data is not base64", param=param) from None


def place_pictures(
    token_ids: TokenIds,
    image_token_id: int,
    files: Sequence[PictureFile],
    vision: VisionCard,
    root: Digest,
) -> Placed:
    """Draw every placeholder out to its picture's rows and key the pictures by content. O(bytes).

    Raises `InvalidRequest` for a size that does not fit, or another number of placeholders."""
    images: list[tuple[int, Digest]] = []
    by_digest: dict[Digest, PictureFile] = {}
    for file in files:
        header = file.header
        grid = resized_grid(header.width, header.height, vision.geometry, param=file.param)
        digest = image_digest(
            file.data,
            header,
            preprocessing=vision.preprocessing,
            model=vision.tower,
            root=root,
        )
        images.append((grid.n_tokens, digest))
        by_digest.setdefault(digest, file)  # of equal ones messages name the first
    expanded = expand_placeholders(token_ids, image_token_id, images)
    return Placed(expanded.token_ids, expanded.spans, by_digest)


def part_chars(part: Any) -> int:
    """Characters of text in a checked part."""
    return len(part.get("text", ""))
