"""The cluster as it stands: all roles there, sockets closed to others, exact hand-offs."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import openai
import pytest

from headrace.cluster.sockets import listeners, refuse_open_listeners
from headrace.core.errors import ConfigError
from headrace.core.link import parse_address
from headrace.core.rows import floor_grain, plan_decode, plan_prefill, record_position
from headrace.engine import LLM

pytestmark = pytest.mark.ray
Live = Any  # the cluster of conftest.py
Conversation = Any  # likewise
Ids = Callable[[str, int], list[int]]

# N >= keep + 128 = 172 on T1: from there on a hand-off gains a block
HANDED_OFF = (172, 255, 256, 257, 300, 383, 384, 385, 500, 640, 1000)


def test_every_role_is_there(live: Live) -> None:
    done = live.command("status", "--json")
    assert done.returncode == 0, done.stderr
    view = json.loads(done.stdout)
    assert view["ready"] is True
    assert view["notes"] == []
    names = ["store-0", "vision-0", "prefill-0", "decode-0", "decode-1", "router-0"]
    assert [role["name"] for role in view["roles"]] == names
    assert all(role["alive"] and role["state"] == "ready" for role in view["roles"])
    assert len({role["pid"] for role in view["roles"]}) == 6
    live.settled()


def test_the_supervisor_runs_in_an_actor_without_our_rooms_on_its_path(
    live: Live, until: Callable[..., None]
) -> None:
    # `up` ran in the repository's top folder, where a folder `kernels` lies
    until(lambda: live.view()["supervisor"] is not None, 10.0, "no report")
    report = live.view()["supervisor"]
    assert report["shadowed_rooms"] == []
    assert report["pid"] in {process.pid for process in live.members()}
    assert report["pid"] != live.state.pid
    assert {role["name"] for role in report["roles"]} == {r["name"] for r in live.view()["roles"]}


def test_a_second_up_says_that_it_runs(live: Live) -> None:
    before = live.members()
    done = live.command("up", str(live.run.config_file))
    assert done.returncode == 1
    assert "cluster live is already ready at" in done.stderr
    assert {p.pid for p in before} <= {p.pid for p in live.members()}


def test_every_socket_is_on_loopback(live: Live) -> None:
    members = live.members()
    names = {process.name for process in members}
    assert {"gcs_server", "raylet", "valkey-server"} <= names
    pids = {process.pid for process in members}
    found = listeners(pids)
    for role in live.view()["roles"]:
        scheme, host, port = parse_address(role["address"])
        if scheme == "tcp":
            assert (host, port, role["pid"]) in [(o.address, o.port, o.pid) for o in found]
    assert [one for one in found if not one.on_loopback] == []
    refuse_open_listeners(pids, [])
    # positive control: the same look finds a listener on all addresses
    with socket.create_server(("0.0.0.0", 0)) as planted:
        held = subprocess.Popen(
            [sys.executable, "-c", "import sys; sys.stdin.read()"],
            stdin=subprocess.PIPE,
            pass_fds=[planted.fileno()],
        )
        with held, pytest.raises(ConfigError, match=f"0.0.0.0:{planted.getsockname()[1]} "):
            refuse_open_listeners({*pids, held.pid}, [])


def test_secrets_and_sockets_are_for_their_owner_only(live: Live) -> None:
    for name in ("token", "ray-token", "api_key", "config.yaml", "state.json", "records.jsonl"):
        path = live.run.path / name
        assert not path.exists() or path.stat().st_mode & 0o077 == 0, name
    assert live.run.path.stat().st_mode & 0o077 == 0
    logs = "".join(path.read_text() for path in live.run.logs.iterdir())
    for secret in (live.run.cluster_token(), live.key("one"), live.key("two")):
        assert secret not in logs


@pytest.mark.parametrize("n", HANDED_OFF)
def test_a_hand_off_is_exact(live: Live, llm: LLM, ids: Ids, n: int) -> None:
    prompt = ids(f"hand-off {n}", n)
    want = llm.generate([prompt], max_tokens=6)[0]
    got = live.complete(prompt, 6)
    assert got.text == want.text
    assert got.finish == want.finish
    keep, geometry = llm.keep_tokens, llm.engine.geometry
    prefill = plan_prefill(n, 0, keep, (), geometry)
    decode = plan_decode(n, floor_grain(n), keep, {record_position(n, keep)}, geometry)
    record = got.record
    assert record["prefill_rows"] == prefill.encoder_rows > 0
    assert (record["encoder_rows"], record["decoder_rows"]) == (
        decode.encoder_rows,
        decode.decoder_rows,
    )
    assert record["decoder_rows"] == keep
    assert record["handoff_extra_rows"] == 0
    assert (record["prefill"], record["start_kind"]) == ("prefill-0", decode.kind)


def test_tenants_do_not_share(live: Live, ids: Ids) -> None:
    prompt = ids("tenants", 2048)
    first = live.complete(prompt, 2, tenant="one")
    other = live.complete(prompt, 2, tenant="two")
    again = live.complete(prompt, 2, tenant="one")
    assert first.text == other.text == again.text
    cold = (2048, 0)  # every row was run, nothing found
    for answer in (first, other):
        assert (answer.record["prefill_rows"], answer.record["prefill_hit_tokens"]) == cold
    assert again.record["prefill_rows"] == 0  # caching is on: the first tenant's own come back
    assert again.usage["prompt_tokens_details"]["cached_tokens"] == 2048
    assert again.record["domain"] == first.record["domain"] != other.record["domain"]


def test_a_second_turn_replays(live: Live, llm: LLM, talk: Conversation) -> None:
    assert live.complete(talk.first, 8).text == talk.answer.text
    got = live.complete(talk.second, 8)
    assert got.text == talk.second_answer.text
    talk.assert_replayed(got.record, llm.keep_tokens)


def test_official_client_in_two_streamed_turns(live: Live, llm: LLM, root: Path) -> None:
    text = (root / "configs" / "texts" / "austen-excerpt.txt").read_text()[:9000]
    client = openai.OpenAI(base_url=f"{live.url}/v1", api_key=live.key(), max_retries=0)
    messages: list[dict[str, str]] = [
        {"role": "system", "content": "You answer questions about this text.\n\n" + text}
    ]
    cached, prompts, known = [], [], len(live.records())
    for question in ("Who is Mr. Bingley?", "And whom does he marry?"):
        messages.append({"role": "user", "content": question})
        parts, finish, usage = [], None, None
        for chunk in client.chat.completions.create(
            model=live.state.model,
            messages=messages,  # type: ignore[arg-type]
            max_tokens=8,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        ):
            if chunk.choices:
                parts.append(chunk.choices[0].delta.content or "")
                finish = chunk.choices[0].finish_reason or finish
            usage = chunk.usage or usage
        assert finish == "length"
        assert len(parts) > 1
        assert usage is not None and usage.completion_tokens == 8
        assert usage.prompt_tokens_details is not None
        cached.append(usage.prompt_tokens_details.cached_tokens)
        prompts.append(usage.prompt_tokens)
        messages.append({"role": "assistant", "content": "".join(parts)})
    first, second = live.records()[known:]
    assert prompts[0] > 2000
    assert first["prefill_rows"] == floor_grain(prompts[0])
    # the second turn finds the first one's blocks, and runs what is new and the keep
    assert cached[1] >= floor_grain(prompts[0])
    assert second["prefill_rows"] == 0
    assert second["encoder_rows"] <= max(prompts[1] - cached[1], llm.keep_tokens + 127)
    assert second["decoder_rows"] == llm.keep_tokens
    live.settled()
