"""The `all` role in one process, offline."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from tokenizers import Tokenizer

from headrace.core.chain import TokenIds, as_token_ids, root_digest
from headrace.core.deployment import Deployment
from headrace.core.errors import HeadraceError, InvalidRequest
from headrace.core.ids import JobKey
from headrace.core.request import FinishReason, GenRequest, Sampling
from headrace.core.rows import plan_decode
from headrace.engine.engine import Engine
from headrace.engine.jobs import Event, Job, SequenceFailed, TokenSampled
from headrace.engine.load import load_engine
from headrace.engine.pictures import Picture
from headrace.engine.settings import EngineSettings, Half
from headrace.model import ServedModel

Prompt = str | Sequence[int]
EventHook = Callable[[Engine, Event], None]

# Nothing leaves this process, so the chain needs no secret.
_OFFLINE_SALT = bytes(32)


@dataclass(frozen=True, slots=True)
class Completion:
    """`token_ids` without the stop id; `text` is their decoding, special tokens left out. Rows as
    counted by the runner, prompt and decode rows together."""

    prompt_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    text: str
    finish: FinishReason
    encoder_rows: int
    decoder_rows: int


@dataclass(slots=True)
class _Running:
    request: GenRequest
    number: int  # place of the prompt in the call
    pictures: Sequence[Picture]
    token_ids: list[int] = field(default_factory=list)


class LLM:
    """Prompts to completions with the engine that a decode replica has, without store, hand-off
    or network: the yardstick. Every prompt runs cold, so nothing depends on what ran before."""

    def __init__(
        self,
        model: str = "t2",
        seed: int = 0,
        numerics: str = "auto",
        keep_tokens: int = 0,
        *,
        device: str = "cpu",
        checkpoint: str = "",
        settings: EngineSettings | None = None,
        poison: bool = False,
    ) -> None:
        """`keep_tokens` 0 stands for the model's default. Raises `ConfigError`."""
        deployment = Deployment(
            model=model,
            seed=seed,
            numerics=numerics,
            keep_tokens=keep_tokens,
            device=device,
            checkpoint=checkpoint,
        )
        self.engine = load_engine(
            deployment, settings or EngineSettings(), Half.FULL, poison=poison
        )
        self.keep_tokens = deployment.keep_for(self.engine.geometry)
        config = self.engine.model.config
        self.tokenizer = ServedModel(deployment).tokenizer()
        self._plain = _without_added_tokens(self.tokenizer)
        self._bos, self._eos = config.bos_token_id, config.eos_token_id
        namespace = self.engine.card(model).namespace()
        self._root = root_digest(namespace.digest(), _OFFLINE_SALT)

    def encode(self, text: str) -> TokenIds:
        """BOS and the ids of `text`, taken as plain text: no added token comes from it."""
        ids = self._plain.encode(text, add_special_tokens=False).ids
        return as_token_ids([self._bos, *ids])

    def generate(
        self,
        prompts: Sequence[Prompt],
        sampling: Sampling | Sequence[Sampling] | None = None,
        max_tokens: int = 64,
        *,
        stop_token_ids: Sequence[int] | None = None,
        pictures: Sequence[Sequence[Picture]] | None = None,
        on_event: EventHook | None = None,
    ) -> list[Completion]:
        """Complete all prompts, in their order. Greedy by default; stops at EOS by default.

        `pictures`: those of each prompt, whose ids then hold one token a row in each span. Raises
        `StateError` for rows of another model.

        `on_event(engine, event)` sees every event while the blocks that it names can be read
        (`engine.state.read_block`) and the slot still holds its windows. Raises the error of the
        first sequence that fails; nothing stays admitted then."""
        shown = pictures if pictures is not None else [()] * len(prompts)
        waiting = [
            _Running(self._request(prompt, one, max_tokens, stop_token_ids, seen), number, seen)
            for number, (prompt, one, seen) in enumerate(
                zip(prompts, _per_prompt(sampling, len(prompts)), shown, strict=True)
            )
        ]
        running: dict[JobKey, _Running] = {}
        done: dict[int, Completion] = {}
        waiting.reverse()
        try:
            while waiting or running:
                self._admit(waiting, running)
                for event in self.engine.step():
                    if on_event is not None:
                        on_event(self.engine, event)
                    if isinstance(event, SequenceFailed):
                        raise event.error
                    if isinstance(event, TokenSampled):
                        self._take(event, running, done)
        finally:
            for key in running:
                self.engine.release(key)
        return [done[number] for number in range(len(prompts))]

    # ---- inside ----------------------------------------------------------------------------

    def _request(
        self,
        prompt: Prompt,
        sampling: Sampling,
        max_tokens: int,
        stop_token_ids: Sequence[int] | None,
        pictures: Sequence[Picture],
    ) -> GenRequest:
        ids = self.encode(prompt) if isinstance(prompt, str) else as_token_ids(prompt)
        spans = tuple(picture.span for picture in pictures)
        stops = (self._eos,) if stop_token_ids is None else tuple(stop_token_ids)
        return GenRequest.offline(
            self._root,
            ids,
            keep_tokens=self.keep_tokens,
            max_tokens=max_tokens,
            sampling=sampling,
            stop_token_ids=stops,
            images=spans,
        )

    def _admit(self, waiting: list[_Running], running: dict[JobKey, _Running]) -> None:
        """Start as many as fit; `waiting` is in falling order, its last comes first."""
        while waiting:
            request = waiting[-1].request
            if self.engine.admit(Job(request, as_token_ids([]), hit_blocks=0)) is None:
                if not running:
                    raise HeadraceError("an empty engine has no room for a request that fits it")
                return
            running[request.key] = one = waiting.pop()
            plan = plan_decode(request.n_tokens, 0, request.keep_tokens, (), self.engine.geometry)
            payloads = {picture.span.digest: picture.payload for picture in one.pictures}
            rows = self.engine.unpack_pictures(request.images, payloads)
            self.engine.start(request.key, plan, None, rows)

    def _take(
        self, event: TokenSampled, running: dict[JobKey, _Running], done: dict[int, Completion]
    ) -> None:
        one = running[event.key]
        if event.finish is not FinishReason.STOP:
            one.token_ids.append(event.token_id)
        if event.finish is None:
            return
        del running[event.key]
        self.engine.release(event.key)
        done[one.number] = Completion(
            prompt_ids=tuple(one.request.token_ids),
            token_ids=tuple(one.token_ids),
            text=self.tokenizer.decode(one.token_ids, skip_special_tokens=True),
            finish=event.finish,
            encoder_rows=event.encoder_rows,
            decoder_rows=event.decoder_rows,
        )


def _without_added_tokens(tokenizer: Tokenizer) -> Tokenizer:
    """The same tokenizer, to which `<｜User｜>` in a text is only its characters."""
    return Tokenizer.from_str(json.dumps({**json.loads(tokenizer.to_str()), "added_tokens": []}))


def _per_prompt(sampling: Sampling | Sequence[Sampling] | None, count: int) -> Sequence[Sampling]:
    if sampling is None or isinstance(sampling, Sampling):
        return [sampling or Sampling()] * count
    if len(sampling) != count:
        raise InvalidRequest(f"{len(sampling)} samplings for {count} prompts", param="sampling")
    return sampling
