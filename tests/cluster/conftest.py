"""Shared by the tests of the cluster room."""

from __future__ import annotations

import json
import random
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import httpx
import pytest

from headrace.cluster.session import Process, read_process
from headrace.core.rows import floor_grain
from headrace.engine import LLM

ORDINARY_IDS = range(300, 4000)  # of the 4,096-id tokenizer: no special token among them


@pytest.fixture(autouse=True)
def short_temp(
    monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Path]:
    """A folder of few characters in place of the temporary one, removed afterwards: unix socket
    paths have 107 bytes, and pytest's own folders are long."""
    tmp_path_factory.getbasetemp()  # made now, so that it does not come to lie in here
    folder = Path(tempfile.mkdtemp(prefix="hr-"))
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    monkeypatch.setenv("TMPDIR", str(folder))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def leader() -> Iterator[Process]:
    """A process that opened a session and waits in it, as a run's leader does."""
    # Not the session of the tests: its leader may be process 1, or out of sight of a container.
    code = "import sys; print(flush=True); sys.stdin.read()"
    with subprocess.Popen(
        [sys.executable, "-I", "-c", code],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
    ) as child:
        assert child.stdout is not None
        child.stdout.readline()  # it runs, so its session is open
        process = read_process(child.pid)
        assert process is not None and process.sid == child.pid
        yield process
        child.kill()


@pytest.fixture(scope="session")
def ids() -> Callable[[str, int], list[int]]:
    """`ids(name, count)`: the same random ordinary token ids for the same name."""

    def make(name: str, count: int) -> list[int]:
        chance = random.Random(name)
        return [chance.choice(ORDINARY_IDS) for _ in range(count)]

    return make


@pytest.fixture(scope="session", name="until")
def until_fixture() -> Callable[..., None]:
    """`until(condition, within_s, message)`."""
    return until


@pytest.fixture(scope="session")
def stream() -> Callable[..., Streamed]:
    """`stream(live, prompt, max_tokens)`: begins a streamed completion."""
    return Streamed


class Streamed:
    """A streamed completion in a thread: its text so far, and a way to leave."""

    def __init__(self, live: Any, prompt: Sequence[int], max_tokens: int) -> None:
        self.known = len(live.records())
        self.text = ""
        self.done = False  # [DONE] arrived
        self.error: dict[str, Any] | None = None
        self._live = live
        self._left = False
        self._client = live.client()
        self._body = live.body(prompt, max_tokens, True)
        self._socket: Any = None
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    @property
    def open(self) -> bool:
        return self._thread.is_alive()

    def finish(self, within_s: float = 60.0) -> dict[str, Any]:
        """Wait for the end; the router's record of it."""
        self._thread.join(within_s)
        assert not self.open, "the stream hangs"
        return cast(dict[str, Any], self._live.next_record(self.known))

    def leave(self) -> dict[str, Any]:
        """Close the connection from the client's side; the router's record of it."""
        assert self.open
        self._left = True
        until(lambda: self._socket is not None, 5.0, "no connection")
        self._socket.shutdown(socket.SHUT_RDWR)
        self._thread.join(10.0)
        assert not self.open
        return cast(dict[str, Any], self._live.next_record(self.known))

    def _read(self) -> None:
        def trace(event: str, info: dict[str, Any]) -> None:
            if event == "connection.connect_tcp.complete":
                self._socket = info["return_value"].get_extra_info("socket")

        try:
            with self._client.stream(
                "POST", "/v1/completions", json=self._body, extensions={"trace": trace}
            ) as answer:
                if answer.status_code != 200:
                    self.error = json.loads(answer.read())["error"]
                    return
                for line in answer.iter_lines():
                    self._take(line)
        except httpx.HTTPError:
            if not self._left:
                self.error = {"message": "the connection broke"}

    def _take(self, line: str) -> None:
        if not line.startswith("data:"):
            return
        data = line[5:].strip()
        if data == "[DONE]":
            self.done = True
            return
        chunk = json.loads(data)
        if "error" in chunk:
            self.error = chunk["error"]
        for choice in chunk.get("choices", ()):
            self.text += choice["text"]


def until(condition: Callable[[], bool], within_s: float, message: str | Callable[[], str]) -> None:
    """Wait for a condition; fails with the message when it does not come in time."""
    deadline = time.monotonic() + within_s
    while not condition():
        if time.monotonic() > deadline:
            pytest.fail(message if isinstance(message, str) else message())
        time.sleep(0.02)


@pytest.fixture(scope="session")
def llm() -> LLM:
    """The yardstick: one engine in this process, cold for every prompt, same keep."""
    return LLM("t1", numerics="invariant")


class Conversation:
    """Two turns given as token ids, 4,000 tokens at the second, and what one engine answers."""

    def __init__(self, llm: LLM, ids: Callable[[str, int], list[int]]) -> None:
        self.first = ids("conversation", 3850)
        self.answer = llm.generate([self.first], max_tokens=8)[0]
        more = ids("second turn", 4000 - 3850 - len(self.answer.token_ids))
        self.second = [*self.first, *self.answer.token_ids, *more]
        self.second_answer = llm.generate([self.second], max_tokens=8)[0]
        # the newest token has no KV yet
        self.stored_tokens = floor_grain(3850 + len(self.answer.token_ids) - 1)
        assert (len(self.second), self.stored_tokens) == (4000, 3840)

    def assert_replayed(self, record: dict[str, Any], keep_tokens: int) -> None:
        """No row on prefill, a bounded suffix on decode, and nothing else."""
        assert (record["prefill"], record["prefill_rows"]) == ("", 0)
        longest = max(len(self.second) - self.stored_tokens, keep_tokens + 127)
        assert 0 < record["encoder_rows"] <= longest
        assert record["decoder_rows"] == keep_tokens


@pytest.fixture(scope="session")
def talk(llm: LLM, ids: Callable[[str, int], list[int]]) -> Conversation:
    return Conversation(llm, ids)
