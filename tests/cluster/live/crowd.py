"""Load: clients that ask on and on, and what a cluster without faults says to each question."""

from __future__ import annotations

import base64
import contextlib
import io
import json
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx
from PIL import Image

from headrace.core.chain import root_digest
from headrace.core.deployment import Deployment
from headrace.core.images import ImageLimits, ImageSpan
from headrace.core.request import Sampling
from headrace.engine import LLM, Picture
from headrace.router.pictures import open_files, place_pictures, take_urls
from headrace.router.protocol import Protocols
from headrace.router.tokens import TextStream, Vocabulary
from headrace.vision import PREPROCESSING_VERSION, VisionSettings
from headrace.vision.role import VisionCard, load_encoder

SEEDED = Sampling(temperature=0.9, top_p=0.95, seed=11)


@dataclass(frozen=True)
class Question:
    """One request, and the answer of one engine that no fault ever met."""

    path: str
    body: dict[str, Any] = field(repr=False)
    text: str
    n_tokens: int
    shows: bool = False  # a picture
    spans: tuple[ImageSpan, ...] = ()
    prompt_tokens: int = 0


@dataclass
class Answer:
    """What a client got, as it came."""

    question: Question
    status: int = 0
    text: str = ""
    n_tokens: int = -1  # of the usage
    usage: dict[str, Any] = field(default_factory=dict)
    headers: dict[str, str] = field(default_factory=dict)
    ends: list[Any] = field(default_factory=list)  # [DONE] and errors
    broken: bool = False  # the connection ended without either

    @property
    def right(self) -> bool:
        """The whole answer, and nothing else: no duplicate, no missing token."""
        wanted = self.question
        got = (self.status, self.text.rstrip("\ufffd"), self.n_tokens, self.ends)
        return got == (200, wanted.text.rstrip("\ufffd"), wanted.n_tokens, ["[DONE]"])

    @property
    def error(self) -> str:
        """The code of the one explicit error; "" when there is none."""
        if len(self.ends) == 1 and isinstance(self.ends[0], dict):
            said: str = self.ends[0]["error"]["code"]
            return said if self.question.text.startswith(self.text.rstrip("\ufffd")) else ""
        return ""


def ask(client: httpx.Client, question: Question, answer: Answer | None = None) -> Answer:
    """Ask once, streamed, and read until the end, into `answer` if given. Raises nothing."""
    answer = answer or Answer(question)
    try:
        with client.stream("POST", question.path, json=question.body) as response:
            answer.status, answer.headers = response.status_code, dict(response.headers)
            if response.status_code != 200:
                answer.ends.append(json.loads(response.read()))
                return answer
            for line in response.iter_lines():
                if line.startswith("data:"):
                    _take(answer, line[5:].strip())
    except httpx.HTTPError:
        answer.broken = True
    answer.broken = answer.broken or not answer.ends
    return answer


def _take(answer: Answer, data: str) -> None:
    value = json.loads(data) if data.startswith("{") else data
    if value == "[DONE]" or "error" in value:
        answer.ends.append(value)
        return
    for choice in value["choices"]:
        answer.text += choice["text"] if "text" in choice else choice["delta"].get("content") or ""
    if usage := value.get("usage"):
        answer.usage, answer.n_tokens = usage, usage["completion_tokens"]


class Asked:
    """One question under way, in a thread: `answer` grows."""

    def __init__(self, live: Any, question: Question) -> None:
        self.answer = Answer(question)
        self._client = live.client()
        self._thread = threading.Thread(target=self._main, daemon=True)
        self._thread.start()

    @property
    def open(self) -> bool:
        return self._thread.is_alive()

    def end(self, within_s: float = 120.0) -> Answer:
        self._thread.join(within_s)
        assert not self.open, "the stream hangs"
        return self.answer

    def _main(self) -> None:
        with self._client as client:
            ask(client, self.answer.question, self.answer)


class Crowd:
    """Clients in threads; each takes the next question of all when it has its answer. When all were
    asked they are asked again by another tenant, for whom nothing is stored, so that there is work
    for every pool however long it takes. A context: at its end no new question is asked, and every
    open one is answered."""

    def __init__(self, live: Any, questions: Sequence[Question], clients: int) -> None:
        self.answers: list[Answer] = []
        self._until = live.until
        self._live = live
        self._rounds = self._take_turns(questions)
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._main, daemon=True) for _ in range(clients)]

    def __enter__(self) -> Crowd:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(120.0)
        assert not any(thread.is_alive() for thread in self._threads), "a client hangs"

    def more(self, n: int, within_s: float = 90.0) -> None:
        """Until `n` further answers were right."""
        wanted = n + sum(answer.right for answer in self.answers)
        self._until(
            lambda: sum(answer.right for answer in self.answers) >= wanted,
            within_s,
            lambda: f"no {n} right answers came; the last: {self.answers[-3:]}",
        )

    def check(self, may_fail: Callable[[Answer], bool] = lambda answer: False) -> list[Answer]:
        """Every answer is the reference text or one explicit error, the latter only where
        `may_fail` says so. Returns the errors."""
        failed = [answer for answer in self.answers if not answer.right]
        wrong = [answer for answer in failed if not answer.error or not may_fail(answer)]
        assert not wrong, wrong[:3]
        return failed

    def _take_turns(self, questions: Sequence[Question]) -> Iterator[tuple[str, Question]]:
        tenant, n_right = self._live.fresh_tenant(), 0
        while True:
            yield from ((tenant, question) for question in questions)
            before, n_right = n_right, sum(answer.right for answer in self.answers)
            if n_right > before:  # an outage shall not use up all tenants
                tenant = self._live.fresh_tenant()

    def _main(self) -> None:
        ours = ""
        with contextlib.ExitStack() as stack:
            while not self._stop.is_set():
                with self._lock:
                    tenant, question = next(self._rounds)
                if tenant != ours:
                    ours, client = tenant, stack.enter_context(self._live.client(tenant))
                answer = ask(client, question)
                self.answers.append(answer)
                if not answer.right:
                    self._stop.wait(0.2)  # an outage must not become a busy loop


class Questions:
    """Makes questions and computes their answers, by one engine and one tower in this process."""

    def __init__(self, llm: LLM, tokenizer: str = "tokenizer-4096") -> None:
        self._llm = llm
        self._vocabulary = Vocabulary(tokenizer)
        self._protocols = Protocols(self._vocabulary)
        deployment = Deployment(model="t1", numerics="invariant")
        self._encoder, self._card = load_encoder(deployment, VisionSettings())

    def plain(
        self, prompts: Sequence[list[int]], max_tokens: int, sampling: Sampling | None = None
    ) -> list[Question]:
        """Completions of prompts given as token ids."""
        chosen = sampling or Sampling()
        done = self._llm.generate(prompts, chosen, max_tokens=max_tokens)
        body = {
            **_streamed(max_tokens),
            "temperature": chosen.temperature,
            **({"top_p": chosen.top_p, "seed": chosen.seed} if sampling else {}),
        }
        return [
            Question(
                "/v1/completions",
                {**body, "prompt": prompt},
                one.text,
                len(one.token_ids),
                prompt_tokens=len(prompt),
            )
            for prompt, one in zip(prompts, done, strict=True)
        ]

    def endless(self, prompt: list[int], max_tokens: int) -> Question:
        """A completion that nobody waits for the end of, so that its text is not computed."""
        body = {**_streamed(max_tokens), "temperature": 0, "prompt": prompt}
        return Question("/v1/completions", body, "", max_tokens, prompt_tokens=len(prompt))

    def shown(self, seed: int, words: str, max_tokens: int, before: str = "See ") -> Question:
        """A chat about a picture that no other seed gives."""
        text = lambda said: {"type": "text", "text": said}  # noqa: E731
        return self.chat([text(before), image_part(png(seed)), text(words)], max_tokens)

    def chat(self, content: list[dict[str, Any]], max_tokens: int) -> Question:
        """A chat of one message of these parts, with data URLs as pictures."""
        messages = [{"role": "user", "content": content}]
        body = {**_streamed(max_tokens), "temperature": 0, "messages": messages}
        inner = json.loads(json.dumps(messages))
        files = open_files(take_urls(inner), ImageLimits())
        made = self._protocols.chat_prompt({"messages": inner, "stream": False})
        tower = self._encoder.tower
        vision = VisionCard(PREPROCESSING_VERSION, tower.identity, tower.geometry)
        root = root_digest(self._card.namespace().digest(), bytes(32))
        placed = place_pictures(made.token_ids, self._card.image_token_id, files, vision, root)
        rows = [
            Picture(span, self._encoder.encode(file.data).payload)
            for span, file in zip(placed.spans, files, strict=True)
        ]
        (done,) = self._llm.generate([placed.token_ids], max_tokens=max_tokens, pictures=[rows])
        spoken = TextStream(self._vocabulary)
        text = spoken.push(done.token_ids) + spoken.finish()
        n_tokens, n_prompt = len(done.token_ids), len(placed.token_ids)
        path = "/v1/chat/completions"
        return Question(path, body, text, n_tokens, True, placed.spans, n_prompt)


def _streamed(max_tokens: int) -> dict[str, Any]:
    options = {"include_usage": True}
    return {"model": "t1", "max_tokens": max_tokens, "stream": True, "stream_options": options}


def image_part(png_bytes: bytes) -> dict[str, Any]:
    url = "data:image/png;base64," + base64.b64encode(png_bytes).decode()
    return {"type": "image_url", "image_url": {"url": url}}


def png(seed: int) -> bytes:
    """A small picture that no other seed gives."""
    draw = random.Random(seed)
    picture = Image.new("RGB", (64, 48), tuple(draw.randrange(256) for _ in range(3)))
    for _ in range(12):
        box = (draw.randrange(64), draw.randrange(48))
        patch = tuple(draw.randrange(256) for _ in range(3))
        picture.paste(patch, (*box, min(64, box[0] + 20), min(48, box[1] + 16)))
    out = io.BytesIO()
    picture.save(out, "PNG")
    return out.getvalue()
