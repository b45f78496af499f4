"""A short chat with a running cluster, as one person sees it: time to the first text, tokens/s.

    make serve                                              # in another terminal
    .venv/bin/python bench/end_to_end/short_chat.py --url http://127.0.0.1:8000/v1 --key KEY

One request at a time, streamed, greedy; a talk of five turns, `--rounds` times, each round
with another name so that nothing of it is stored. Tokens/s are those after the first, over all
answers of ten tokens and more. Medians, and the worst.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from statistics import median

import httpx

NAMES = ("Anna", "Tom", "Ruth", "Max", "Mina", "Ben", "Clara", "Paul")
TURNS = (
    "Hello, I am {name}.",
    "I live in Rome.",
    "Tell me a story about {name} and a red kite.",
    "What is 27 + 48?",
    "Where do I live?",
)
ANSWER_TOKENS = 200
ENOUGH_TOKENS = 10


def ask(
    client: httpx.Client, model: str, messages: list[dict[str, str]]
) -> tuple[str, float, float, int]:
    """(answer, seconds to its first text, seconds from there to the end, its tokens)."""
    body = {
        "model": model,
        "messages": messages,
        "temperature": 0,
        "max_tokens": ANSWER_TOKENS,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    began, first, text, n_tokens = time.perf_counter(), 0.0, "", 0
    with client.stream("POST", "/chat/completions", json=body) as response:
        response.raise_for_status()
        for line in response.iter_lines():
            if not line.startswith("data: {"):
                continue
            event = json.loads(line.removeprefix("data: "))
            if event.get("usage"):
                n_tokens = event["usage"]["completion_tokens"]
            for choice in event["choices"]:
                said = choice["delta"].get("content") or ""
                if said and not text:
                    first = time.perf_counter() - began
                text += said
    return text, first, time.perf_counter() - began - first, n_tokens


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--url", default="http://127.0.0.1:8000/v1")
    parser.add_argument("--key", required=True)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--rounds", type=int, default=4, choices=range(1, len(NAMES) + 1))
    a = parser.parse_args()
    headers = {"authorization": f"Bearer {a.key}"}
    firsts, rates = [], []
    with httpx.Client(base_url=a.url, headers=headers, timeout=120) as client:
        for name in NAMES[: a.rounds]:
            messages: list[dict[str, str]] = []
            for turn in TURNS:
                messages.append({"role": "user", "content": turn.format(name=name)})
                text, first_s, rest_s, n = ask(client, a.model, messages)
                messages.append({"role": "assistant", "content": text})
                firsts.append(first_s)
                if n >= ENOUGH_TOKENS:
                    rates.append((n - 1) / rest_s)
                print(f"{first_s * 1000:6.0f} ms  {n:4} tokens in {rest_s:5.2f} s  {text[:60]!r}")
    load = os.getloadavg()[0]
    print(f"\n{len(firsts)} answers, load {load:.1f}")
    print(f"first text: median {median(firsts) * 1000:.0f} ms, worst {max(firsts) * 1000:.0f} ms")
    print(f"tokens/s after it: median {median(rates):.1f}, worst {min(rates):.1f}")


if __name__ == "__main__":
    main()
