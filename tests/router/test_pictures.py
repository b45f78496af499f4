"""Pictures at the edge: which rows need one, where one goes, and what is said without vision."""

from __future__ import annotations

import base64
import hashlib
import itertools
import textwrap
import urllib.parse

import pytest

from headrace.core.chain import as_token_ids
from headrace.core.errors import InvalidRequest, LimitExceeded
from headrace.core.ids import Digest
from headrace.core.images import ImageSpan
from headrace.core.limits import ImageLimits
from headrace.core.request import GenRequest
from headrace.core.rows import Geometry
from headrace.router.pictures import DATA_ONLY, WITH_FETCH, Schemes, open_files, read_image_part
from headrace.router.policy import size_up
from headrace.router.sight import spans_needed, two_rings

GEOMETRY, KEEP = Geometry(32, 6, 6), 44
# A header of 2 x 2 pixels; nobody looks at what follows.
PNG = base64.b64encode(
    b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR\0\0\0\2\0\0\0\2\x08\2\0\0\0"
    + b"\xfd\xd4\x9a\x73"
    + b"\0\0\0\4IDAT\0\0\0\0"
    + bytes(4)
    + b"\0\0\0\0IEND\xaeB\x60\x82"
).decode()


def digest(number: int) -> Digest:
    return Digest(hashlib.sha256(b"%d" % number).digest())


def request(n_tokens: int, starts: tuple[int, ...]) -> GenRequest:
    ids = as_token_ids([5] * n_tokens)
    spans = tuple(ImageSpan(start, 22, digest(start)) for start in starts)
    return GenRequest.offline(digest(-1), ids, keep_tokens=KEEP, max_tokens=8, images=spans)


@pytest.mark.parametrize(
    ("hit_blocks", "windows", "handed_off", "needed"),
    [
        (0, (), False, (0, 200, 362, 390, 478)),  # cold: every row runs
        (0, (), True, (0, 200, 362, 390, 478)),  # prefill runs to 384, decode from 384
        (3, (384,), False, (390, 478)),  # rows from 384: the span that ends there is not needed
        (3, (384,), True, (390, 478)),  # prefill runs nothing
        (3, (), False, (200, 362, 390, 478)),  # an exact replay begins at 198
        (2, (256,), True, (362, 390, 478)),  # prefill runs from 256
    ],
)
def test_pictures_in_rows_that_run(
    hit_blocks: int, windows: tuple[int, ...], handed_off: bool, needed: tuple[int, ...]
) -> None:
    """N = 500, F = 456, p = 384. The third span ends at 384."""
    asked = request(500, (0, 200, 362, 390, 478))
    work = size_up(500, 8, hit_blocks, windows, KEEP, GEOMETRY, 0)
    found = spans_needed(asked, work, handed_off=handed_off)
    assert tuple(span.start for span in found) == needed


def test_a_picture_goes_to_the_same_two_wherever_it_is_asked_from() -> None:
    names = [f"vision-{i}" for i in range(5)]
    pairs = {}
    for number in range(200):
        pair = two_rings(digest(number), names)
        assert all(
            two_rings(digest(number), list(order)) == pair
            for order in itertools.islice(itertools.permutations(names), 0, 120, 17)
        )
        pairs[number] = pair
        without = [name for name in names if name != "vision-3"]
        if "vision-3" not in pair:  # others keep theirs when a replica leaves
            assert two_rings(digest(number), without) == pair
    first = [sum(pair[0] == name for pair in pairs.values()) for name in names]
    assert min(first) > 15  # 40 each on average
    assert two_rings(digest(0), ["only"]) == ["only"]
    assert two_rings(digest(0), []) == []


@pytest.mark.parametrize(
    ("schemes", "url", "said"),
    [
        (DATA_ONLY, "https://a.example/b.png", "since router.fetch.hosts names no host"),
        (DATA_ONLY, "HTTP://a.example/b.png", "since router.fetch.hosts names no host"),
        (WITH_FETCH, "ftp://a.example/b.png", "as data:, http: and https: URLs only"),
    ],
)
def test_a_url_that_is_not_taken_names_what_would_take_it(
    schemes: Schemes, url: str, said: str
) -> None:
    part = {"type": "image_url", "image_url": {"url": url}}
    with pytest.raises(InvalidRequest) as refused:
        read_image_part(part, "messages[0].content[1]", schemes)
    assert refused.value.message.endswith(said)
    assert refused.value.param == "messages[0].content[1]"


@pytest.mark.redis
async def test_without_vision(rigs) -> None:
    url = {"url": f"data:image/png;base64,{PNG}"}
    content = [{"type": "text", "text": "look"}, {"type": "image_url", "image_url": url}]
    body = {"model": "scripted", "messages": [{"role": "user", "content": content}]}
    async with rigs(images=True) as rig:
        answer = await rig.client.post("/v1/chat/completions", json=body)
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "no_replica")
        assert "retry-after" in answer.headers
        assert "vision" in answer.json()["error"]["message"]
        ready = await rig.client.get("/ready")  # for all but pictures
        assert (ready.status_code, ready.json()["replicas"]) == (
            200,
            {"vision": 0, "prefill": len(rig.prefills), "decode": len(rig.decodes)},
        )
        await rig.until(rig.nothing_held)
        await rig.pulse()
    async with rigs() as rig:
        answer = await rig.client.post("/v1/chat/completions", json=body)
        error = answer.json()["error"]
        assert (answer.status_code, error["param"]) == (400, "messages[0].content[1]")
        assert "not offered" in error["message"]
        replicas = (await rig.client.get("/ready")).json()["replicas"]
        assert replicas == {"prefill": len(rig.prefills), "decode": len(rig.decodes)}


def _spaced(text: str) -> str:
    return "\r\n".join(textwrap.wrap(text, 16))


@pytest.mark.parametrize(
    "url",
    [
        f"data:image/png;base64,{PNG}",
        f"data:image/png;base64,{_spaced(PNG)}\n",
        f"data:image/png;base64,\t{PNG[:9]} {PNG[9:]}",
        f"data:image/png;name=a.png; base64,{PNG}",
        f"DATA:IMAGE/PNG;BASE64,{PNG.rstrip('=')}",
        "data:image/png;base64," + urllib.parse.quote(_spaced(PNG), safe=""),
    ],
    ids=["plain", "lines", "blanks", "blank before base64", "no padding", "percent"],
)
def test_data_urls_as_they_are_written(url: str) -> None:
    """Forgiving base64: an encoder may break lines, and a URL may have them percent-encoded."""
    (file,) = open_files([("here", url)], ImageLimits())
    assert base64.b64encode(file.data).decode() == PNG


@pytest.mark.parametrize(
    "data", [PNG[:-5] + "!" + PNG[-4:], "A" * 401, PNG + "===", "=", "%", "-_"]
)
def test_what_is_no_base64_is_refused_with_its_place(data: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        open_files([("here", f"data:image/png;base64,{data}")], ImageLimits())
    assert refused.value.param == "here"


def test_the_bound_of_a_file_is_on_its_bytes_not_on_blanks_between_them() -> None:
    size = len(base64.b64decode(PNG))
    url = f"data:image/png;base64,{_spaced(PNG)}{chr(10) * 1000}"
    (file,) = open_files([("here", url)], ImageLimits(file_bytes=size))
    assert len(file.data) == size
    with pytest.raises(LimitExceeded, match=f"limited to {size - 3} bytes"):
        open_files([("here", url)], ImageLimits(file_bytes=size - 3))
