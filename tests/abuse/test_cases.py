"""Every case of cases.yaml: the right refusal, nothing harmed."""

from __future__ import annotations

import asyncio
import gzip
import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from headrace.core.limits import EdgeLimits

CASES = yaml.safe_load((Path(__file__).parent / "cases.yaml").read_text("utf-8"))
GOOD: dict[str, dict[str, Any]] = {
    "chat": {"model": "scripted", "messages": [{"role": "user", "content": "a"}]},
    "completions": {"model": "scripted", "prompt": "a"},
}
PATHS = {"chat": "/v1/chat/completions", "completions": "/v1/completions"}
KEYS = {
    "valid": "Bearer key-of-tenant-a-0123",
    "wrong": "Bearer key-of-tenant-a-0124",
    "prefix": "Bearer key-of-tenant-a-012",
    "long": "Bearer " + "k" * 50_000,
}
LIMITS = EdgeLimits()


def merged(path: str, **fields: Any) -> bytes:
    return json.dumps(GOOD[path] | fields, ensure_ascii=False).encode()


def user(content: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": content}]


MAKERS: dict[str, bytes] = {
    "bad_utf8": b'{"model": "scripted", "messages": [{"role": "user", "content": "\xff"}]}',
    "bom": b"\xef\xbb\xbf" + merged("chat"),
    "deep_array": b"[" * 5000 + b"]" * 5000,
    "deep_object": b'{"a":' * 5000 + b"1" + b"}" * 5000,
    "levels_65": b'{"metadata":' * 65 + b"1" + b"}" * 65,
    "body_cap_plus_1": merged("completions").ljust(LIMITS.body_bytes + 1),
    "gzip_bomb": gzip.compress(bytes(10 << 20)),
    "n_400_digits": b'{"model": "scripted", "n": ' + b"9" * 400 + b"}",
    "n_10000_digits": b'{"model": "scripted", "n": ' + b"9" * 10_000 + b"}",
    "prompt_of_context": merged("completions", prompt=[300] * 16_384),
    "many_stops": merged("chat", stop=["a"] * 10_000),
    "long_stop": merged("completions", stop="a" * (1 << 20)),
    "many_ids": merged("completions", prompt=[300] * (LIMITS.prompt_tokens + 1)),
    "long_model": merged("chat", model="m" * (1 << 20)),
    "many_messages": merged("chat", messages=user("a") * 100_000),
    "text_below_cap": merged("completions", prompt="ab " * (1 << 20)),
    "messages_below_cap": merged("chat", messages=user("水" * (1 << 19)) * 4),
    "text_above_cap": merged("completions", prompt="a" * (LIMITS.prompt_chars + 1)),
    "messages_above_cap": merged("chat", messages=user("a" * (LIMITS.prompt_chars // 3)) * 4),
}


def build(case: dict[str, Any]) -> tuple[str, str, bytes | None, dict[str, str]]:
    """(method, path, body, headers) of a case."""
    name = case["path"]
    method = case.get("method", "POST")
    headers = {}
    body: bytes | None = None
    if "make" in case:
        body = MAKERS[case["make"]]
    elif "raw" in case:
        body = case["raw"].encode("utf-8", "surrogatepass")
    elif method == "POST":
        fields = GOOD.get(name, {}) | case.get("body", {})
        body = json.dumps({k: v for k, v in fields.items() if v is not None}).encode()
    if body is not None:
        headers["content-type"] = "application/json"
    if case.get("make") == "gzip_bomb":
        headers["content-encoding"] = "gzip"
    headers |= case.get("headers", {})
    if (key := case.get("key", "valid")) != "none":
        headers["authorization"] = KEYS[key]
    return method, PATHS.get(name, name), body, headers


def test_ids_are_unique_and_every_case_expects_a_refusal() -> None:
    assert len({case["id"] for case in CASES}) == len(CASES)
    assert all(400 <= case["expect"]["status"] < 500 for case in CASES)
    assert all("\\u" not in case.get("raw", "") or '"' in case["raw"] for case in CASES)


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("case", CASES, ids=[case["id"] for case in CASES])
async def test_case(rig: Any, case: dict[str, Any]) -> None:
    method, path, body, headers = build(case)
    jobs = len(rig.decodes[0].jobs)
    async with rig.new_client() as client:
        if "authorization" not in headers:
            client.headers.pop("authorization")
        answer = await client.request(method, path, content=body, headers=headers)
    expect = case["expect"]
    assert answer.status_code == expect["status"], answer.text
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    for name in ("type", "param", "code"):
        if name in expect:
            assert error[name] == expect[name], error
    for hidden in ("Traceback", "/home", "site-packages", "127.0.0.1", ".py", "0x", "u32", "serde"):
        assert hidden not in answer.text
    assert len(answer.text) < 1000
    assert len(rig.decodes[0].jobs) == jobs  # nothing was touched
    await rig.pulse()


@pytest.mark.asyncio(loop_scope="module")
async def test_ignored_fields_change_nothing(rig: Any) -> None:
    """A8, A10: what a client says of itself is taken in and means nothing."""
    extra = {
        "user": "mallory",
        "store": True,
        "metadata": {"a": "b"},
        "cache_salt": "of-another",
        "request_id": "of-another",
        "parallel_tool_calls": False,
    }
    headers = {"x-tenant": "b", "x-request-id": "of-another"}
    nothing = await rig.client.post(
        PATHS["completions"], json=GOOD["completions"] | {"echo": False, "suffix": ""}
    )
    assert nothing.status_code == 200  # the control of cases B8
    for path, good in GOOD.items():
        answer = await rig.client.post(PATHS[path], json=good | extra, headers=headers)
        assert answer.status_code == 200, answer.text
        request = rig.decodes[0].jobs[-1].request
        assert request.domain == "a" and request.request_id == answer.headers["x-request-id"]
        assert request.request_id != "of-another"


@pytest.mark.asyncio(loop_scope="module")
async def test_null_is_as_good_as_absent(rig: Any) -> None:
    names = ("max_tokens", "temperature", "top_p", "seed", "stop", "stream", "n", "logprobs")
    for path, good in GOOD.items():
        answer = await rig.client.post(PATHS[path], json=good | dict.fromkeys(names))
        assert answer.status_code == 200, answer.text
        assert rig.decodes[0].jobs[-1].request.max_tokens == 256  # the documented default


@pytest.mark.asyncio(loop_scope="module")
async def test_every_route_wants_a_key_but_the_two_open_ones(rig: Any) -> None:
    """A7: a walk over the route table itself."""
    from headrace.router.app import ENDPOINTS

    assert {e.path for e in ENDPOINTS if e.open} == {"/health", "/ready"}
    async with rig.new_client() as client:
        for endpoint in ENDPOINTS:
            for method in endpoint.methods:
                path = endpoint.path.replace("*", "scripted")
                for key in ("", "Bearer", "Bearer wrong-key-0000", "Basic a2V5", "key"):
                    client.headers["authorization"] = key
                    answer = await client.request(method, path)
                    assert (answer.status_code == 401) == (not endpoint.open), (path, key)
    await rig.pulse()


@pytest.mark.asyncio(loop_scope="module")
async def test_a_key_is_checked_before_the_body_is_read(rig: Any) -> None:
    """A7: a head that announces a body which never comes is answered at once."""
    for key, status in (("nobody-knows-this", b"401"), ("key-of-tenant-a-0123", b"413")):
        reader, writer = await asyncio.open_connection("127.0.0.1", rig.port)
        head = (
            f"POST /v1/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {key}\r\n"
            "content-type: application/json\r\ncontent-length: 99999999999\r\n\r\n"
        )
        writer.write(head.encode())
        line = await asyncio.wait_for(reader.readline(), 5)
        assert status in line
        writer.close()
    await rig.pulse()


@pytest.mark.asyncio(loop_scope="module")
async def test_a_key_longer_than_a_head_may_be_is_refused_with_the_head(rig: Any) -> None:
    async with rig.new_client(key="k" * 1_000_000) as client:
        answer = await client.get("/v1/models")
    assert answer.status_code == 431
    await rig.pulse()
