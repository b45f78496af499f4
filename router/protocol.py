"""Requests into prompts and token ids into answers, by the protocol library where it has one.

Chat prompts, their encoding, stop strings, reasoning and tool-call parsing and chat chunks come
from deepseek-recipe; `/v1/completions` is written here. A `Speaker` serves one attempt at one
request: a retry before the first byte takes a fresh one.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import deepseek_recipe as recipe
import orjson

from headrace.core.chain import TokenIds, as_token_ids
from headrace.core.errors import InvalidRequest
from headrace.core.request import FinishReason
from headrace.router.jsonbody import Json
from headrace.router.pictures import count_images
from headrace.router.tokens import StopScanner, TextStream, Vocabulary

_ALIAS = "headrace"
# The library keeps these special in assistant content, and no template of its own says them.
_REGION_MARKS = tuple(
    f"<｜{slash}{name}｜>" for name in ("ref", "box", "point", "polygon") for slash in ("", "/")
)
_UNBOUNDED = (1 << 32) - 1  # max_tokens is checked against the model's context, not by the library
_FINISH = {
    FinishReason.STOP: recipe.InferenceFinishReason.Stop,
    FinishReason.LENGTH: recipe.InferenceFinishReason.Length,
}


@dataclass(frozen=True, slots=True)
class Usage:
    """What a client is told of its tokens; cached ones are among those of the prompt."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int

    def body(self) -> Json:
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }


class Speaker(Protocol):
    """Turns one attempt's tokens into the endpoint's JSON. `push` and `finish` give stream events;
    `whole` gives the plain answer after `finish`. Nothing is pushed after `stopped` is True.

    A stream tells its usage only when asked to: then an event without choices is the last, and the
    field is null in those before it. A plain answer always does.

    `n_tokens`: those pushed so far, up to the one that completed a stop string. Which ones come in
    one piece is chance, and what a client reads and pays for must not depend on it."""

    n_tokens: int

    @property
    def stopped(self) -> bool:
        """Whether a stop string ended the text."""
        ...

    def push(self, token_ids: Sequence[int]) -> list[bytes]: ...
    def finish(self, reason: FinishReason, usage: Usage) -> list[bytes]: ...
    def whole(self) -> bytes: ...


class ChatPrompt:
    """A converted chat request: its prompt's ids, and speakers for its answer."""

    def __init__(self, request: recipe.ConversationRequest, token_ids: TokenIds) -> None:
        self._request = request
        self.token_ids = token_ids

    @property
    def temperature(self) -> float:
        """The one in force: thinking fixes it."""
        value = self._request.inference_options.temperature
        return 1.0 if value is None else float(value)

    @property
    def top_p(self) -> float:
        value = self._request.inference_options.top_p
        return 1.0 if value is None else float(value)

    def speaker(
        self, request_id: str, model: str, tokenizer: recipe.Tokenizer, include_usage: bool
    ) -> Speaker:
        id = f"chatcmpl-{request_id}"
        return _ChatSpeaker(self._request, id, model, tokenizer, include_usage)


class Protocols:
    """The protocol library bound to one tokenizer. Immutable; safe to use from several threads."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.vocabulary = vocabulary
        self.tokenizer = recipe.Tokenizer.from_str(vocabulary.text)
        self._encoding = recipe.DeepseekV41Encoding().with_tokenizer(self.tokenizer)
        self._options = recipe.ConversionOptions(
            default_thinking_mode=False,
            thinking_max_tokens_upper_bound=_UNBOUNDED,
            non_thinking_max_tokens_upper_bound=_UNBOUNDED,
        ).with_model_alias(_ALIAS, recipe.ModelVersion.DeepseekV41Flash)
        self._plain_marks: dict[int, Sequence[int]] = {
            vocabulary.added[mark]: vocabulary.encode_plain(mark)
            for mark in _REGION_MARKS
            if mark in vocabulary.added
        }

    def chat_prompt(self, chat: Json) -> ChatPrompt:
        """Render and encode a checked chat body; a picture becomes one placeholder. O(text),
        releases the GIL while encoding. No id of an added token comes from content, whatever the
        role: such an id is the template's or a picture's.

        Raises `InvalidRequest` for what the template refuses, in our words."""
        try:
            request = recipe.ChatCompletionRequest({**chat, "model": _ALIAS}).convert(self._options)
        except recipe.ConversionError as error:
            raise InvalidRequest(_message_of(error), param="messages") from None
        except (ValueError, TypeError, OverflowError, RecursionError):
            # The library's text names Rust types. What it cannot hold is the content's fault.
            raise InvalidRequest("messages cannot be rendered", param="messages") from None
        seen = sum(len(message.image_sources) for message in request.conversation.messages or ())
        if seen != count_images(chat["messages"]):
            raise InvalidRequest("messages cannot be rendered with these images", param="messages")
        token_ids = as_token_ids(self._encoding.encode(request.conversation))
        return ChatPrompt(request, self._without_marks(token_ids))

    def _without_marks(self, token_ids: TokenIds) -> TokenIds:
        """Marks of a picture's regions, which content alone can hold, as the characters they are:
        a client writes assistant messages too."""
        marks = self._plain_marks
        if marks.keys().isdisjoint(token_ids):
            return token_ids
        return as_token_ids([part for i in token_ids for part in marks.get(i, (i,))])

    def completion_speaker(
        self, request_id: str, model: str, stop: tuple[str, ...], include_usage: bool
    ) -> Speaker:
        id = f"cmpl-{request_id}"
        return _CompletionSpeaker(id, model, stop, self.vocabulary, include_usage)


class _ChatSpeaker:
    def __init__(
        self,
        request: recipe.ConversationRequest,
        id: str,
        model: str,
        tokenizer: recipe.Tokenizer,
        include_usage: bool,
    ) -> None:
        generator = recipe.ChatCompletionRequest.chunk_generator(request, id, model)
        self._processor = recipe.StreamProcessor(generator, request.parsing_options, tokenizer)
        self._identity = (id, model)
        self._include_usage = include_usage
        self._last: Json = {}  # the library's chunk with the finish reason and its own usage
        self._chunks: list[Any] = []
        self._usage: Usage | None = None
        self.n_tokens = 0

    @property
    def stopped(self) -> bool:
        return bool(self._processor.finished)

    def push(self, token_ids: Sequence[int]) -> list[bytes]:
        """One by one: at the end the library drops all of a piece that ends inside a character,
        and the pieces that a client's reading made would decide what it reads."""
        out: list[bytes] = []
        for token_id in token_ids:
            if self.stopped:
                break
            self.n_tokens += 1
            out += self._take(self._processor.push(recipe.InferenceChunk.tokens([token_id])))
        return out

    def finish(self, reason: FinishReason, usage: Usage) -> list[bytes]:
        out: list[bytes] = []
        if not self.stopped:
            out = self._take(self._processor.push(recipe.InferenceChunk.finish(_FINISH[reason])))
            out += self._take(self._processor.finish())
        self._usage = usage
        if self._include_usage:
            out.append(_with_usage(self._last | {"choices": []}, usage))
        return out

    def whole(self) -> bytes:
        assert self._usage is not None, "whole() comes after finish()"
        id, model = self._identity
        response = recipe.ChatCompletionResponse(id, model, int(time.time()), 0, 0)
        for chunk in self._chunks:
            response.accumulate(chunk)
        return _with_usage(orjson.loads(response.to_json()), self._usage)

    def _take(self, chunks: Iterable[Any]) -> list[bytes]:
        """JSON of these chunks. The library puts a usage of its own beside the finish reason; the
        true one comes later: what was cached is known only when the replica reports."""
        out: list[bytes] = []
        for chunk in chunks:
            payload = chunk.to_json().encode()
            self._chunks.append(chunk)
            if self._processor.finished and b'"usage":{' in payload:
                self._last = orjson.loads(payload)
                payload = orjson.dumps(_without_usage(self._last, self._include_usage))
            out.append(payload)
        return out


class _CompletionSpeaker:
    def __init__(
        self,
        id: str,
        model: str,
        stop: tuple[str, ...],
        vocabulary: Vocabulary,
        include_usage: bool,
    ) -> None:
        self._head = {"id": id, "object": "text_completion", "created": int(time.time())}
        self._head["model"] = model
        self._include_usage = include_usage
        self._text = TextStream(vocabulary)
        self._scanner = StopScanner(stop)
        self._parts: list[str] = []
        self._reason = FinishReason.STOP
        self._usage: Usage | None = None
        self.n_tokens = 0

    @property
    def stopped(self) -> bool:
        return self._scanner.stopped

    def push(self, token_ids: Sequence[int]) -> list[bytes]:
        text = ""
        for token_id in token_ids:
            if self.stopped:
                break
            self.n_tokens += 1
            text += self._scanner.push(self._text.push((token_id,)))
        return self._say(text)

    def finish(self, reason: FinishReason, usage: Usage) -> list[bytes]:
        text = ""
        if not self.stopped:
            text = self._scanner.push(self._text.finish())
            if not self.stopped:
                text += self._scanner.finish()
        self._reason = FinishReason.STOP if self.stopped else reason
        self._usage = usage
        out = [*self._say(text), self._event("", self._reason.value)]
        if self._include_usage:
            out.append(orjson.dumps({**self._head, "choices": [], "usage": usage.body()}))
        return out

    def whole(self) -> bytes:
        assert self._usage is not None, "whole() comes after finish()"
        body = self._body("".join(self._parts), self._reason.value)
        return orjson.dumps(body | {"usage": self._usage.body()})

    def _say(self, text: str) -> list[bytes]:
        if not text:
            return []
        self._parts.append(text)
        return [self._event(text, None)]

    def _event(self, text: str, reason: str | None) -> bytes:
        return orjson.dumps(_without_usage(self._body(text, reason), self._include_usage))

    def _body(self, text: str, reason: str | None) -> Json:
        choice = {"index": 0, "text": text, "logprobs": None, "finish_reason": reason}
        return {**self._head, "choices": [choice]}


def _with_usage(body: Json, usage: Usage) -> bytes:
    """A chunk or response of the library with the true counts in place of its own."""
    counts = usage.body()
    details = body["usage"].get("completion_tokens_details")
    if details is not None:
        counts["completion_tokens_details"] = details
    return orjson.dumps(body | {"usage": counts})


def _without_usage(body: Json, include_usage: bool) -> Json:
    """A stream event that is not the one with the counts."""
    rest = {name: value for name, value in body.items() if name != "usage"}
    return rest | {"usage": None} if include_usage else rest


def _message_of(error: recipe.ConversionError) -> str:
    """The sentence inside the library's error body; it names fields and ranges, no internals."""
    try:
        return str(orjson.loads(error.body)["error"]["message"])
    except (orjson.JSONDecodeError, KeyError, TypeError):
        return "messages cannot be rendered"
