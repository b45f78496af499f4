"""Answers of a router over scripted replicas: both endpoints, streamed and plain."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest

REFERENCE = "The river runs to the mill, and the mill grinds.\n"
KEY = "key-of-tenant-a-0123"
CHAT = {"model": "scripted", "messages": [{"role": "user", "content": "Tell me of the mill."}]}


def events(text: str) -> list[Any]:
    parts = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    return [part if part == "[DONE]" else json.loads(part) for part in parts]


async def test_plain_completion(rigs: Any) -> None:
    async with rigs() as rig:
        body = {"model": "alias", "prompt": "x", "max_tokens": 64}
        answer = await rig.client.post("/v1/completions", json=body)
        said = answer.json()
        assert answer.status_code == 200
        assert said["object"] == "text_completion" and said["model"] == "alias"
        assert said["choices"] == [
            {"index": 0, "text": REFERENCE, "logprobs": None, "finish_reason": "stop"}
        ]
        n = len(rig.reference_ids)
        assert said["usage"]["completion_tokens"] == n
        assert said["usage"]["prompt_tokens"] == 2  # BOS and one token
        job = rig.decodes[0].jobs[0]
        assert list(job.request.token_ids) == [0, *rig.vocabulary.encode_plain("x")]
        assert job.request.stop_token_ids == (1,) and not job.await_prefill
        await rig.until(rig.nothing_held)


async def test_openai_client_both_ways(rigs: Any) -> None:
    async with rigs() as rig:
        client = openai.AsyncOpenAI(api_key=KEY, base_url=f"{rig.urls[0]}/v1")
        answer = await client.chat.completions.create(**CHAT, max_tokens=64)
        assert answer.choices[0].message.content == REFERENCE
        history = [*CHAT["messages"], answer.choices[0].message.model_dump()]
        history.append({"role": "user", "content": "And then?"})
        stream = await client.chat.completions.create(
            model="scripted",
            messages=history,
            stream=True,
            stream_options={"include_usage": True},
        )
        text, usage, reason = "", None, None
        async for chunk in stream:
            for choice in chunk.choices:
                text += choice.delta.content or ""
                reason = choice.finish_reason or reason
            usage = chunk.usage or usage
        assert (text, reason) == (REFERENCE, "stop")
        assert usage is not None and usage.completion_tokens == len(rig.reference_ids)
        assert [model.id async for model in client.models.list()] == ["scripted", "alias"]
        assert (await client.models.retrieve("alias")).id == "alias"
        with pytest.raises(openai.NotFoundError):
            await client.models.retrieve("gpt")
        await client.close()
        await rig.pulse()
