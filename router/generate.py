"""The two endpoints that generate: from a body to a ticket, from a ticket to an answer."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias, TypeVar

from headrace.core.card import ModelCard
from headrace.core.chain import TokenIds, root_digest
from headrace.core.clock import SYSTEM_CLOCK
from headrace.core.deployment import Deployment
from headrace.core.errors import Cancelled, HeadraceError, LimitExceeded, NotFound
from headrace.core.ids import Digest, RequestId, new_request_id
from headrace.core.images import span_block_digests
from headrace.core.limits import ImageLimits, Limit
from headrace.core.records import RequestRecord
from headrace.core.request import FinishReason, GenRequest, Sampling
from headrace.core.states import RequestEvent
from headrace.kvstore import SaltBook
from headrace.router.desk import Desk
from headrace.router.fetch import Fetcher
from headrace.router.http import Exchange
from headrace.router.jsonbody import Json, parse_object
from headrace.router.keys import Principal
from headrace.router.pictures import (
    DATA_ONLY,
    WITH_FETCH,
    PictureFile,
    Placed,
    open_files,
    place_pictures,
)
from headrace.router.pieces import Piece
from headrace.router.protocol import Protocols, Speaker, Usage
from headrace.router.requests import Ticket
from headrace.router.settings import RouterSettings
from headrace.router.tokens import OFF_LOOP_CHARS
from headrace.router.validate import (
    Ask,
    check_prompt_ids,
    read_chat,
    read_completion,
    resolve_max_tokens,
)

OFF_LOOP_BODY_BYTES = 64 << 10
SHOWN_NAME_CHARS = 64  # of a name that a client sent and a message repeats
OFF_LOOP_TOKENS = 32_768  # about 1 ms of hashing
T = TypeVar("T")
Reader: TypeAlias = Callable[[Json], Ask]
MakeSpeaker: TypeAlias = Callable[[], Speaker]


@dataclass(frozen=True, slots=True)
class Prompt:
    """An encoded prompt, what its protocol fixed, and how its answer is spoken."""

    token_ids: TokenIds
    temperature: float
    top_p: float
    make_speaker: MakeSpeaker


class Generator:
    """Serves `/v1/chat/completions` and `/v1/completions`. One a router."""

    def __init__(
        self,
        settings: RouterSettings,
        deployment: Deployment,
        desk: Desk,
        protocols: Protocols,
        salts: SaltBook,
        fetcher: Fetcher,
    ) -> None:
        self._settings = settings
        self._deployment = deployment
        self._edge = deployment.edge
        self._desk = desk
        self._protocols = protocols
        self._salts = salts
        self._fetcher = fetcher
        schemes = WITH_FETCH if settings.fetch.hosts else DATA_ONLY
        self.takes_images = settings.images
        images = schemes if settings.images else ()
        self._read_chat = partial(read_chat, limits=self._edge, images=images)

    async def chat(self, exchange: Exchange, principal: Principal) -> None:
        await self._serve(exchange, principal, "chat", self._read_chat)

    async def completion(self, exchange: Exchange, principal: Principal) -> None:
        reader = partial(read_completion, limits=self._edge)
        await self._serve(exchange, principal, "completions", reader)

    def model_names(self) -> list[str]:
        """Names a request may use: the served model's, then the aliases."""
        card = self._desk.replicas.card
        return [*([card.name] if card is not None else []), *self._settings.model_aliases]

    def check_served(self, name: str) -> None:
        """Raises `NotFound` naming the model asked for, cleaned and shortened, and those served."""
        served = self.model_names()
        if name not in served:
            asked = "".join(c if c.isprintable() else "?" for c in name[:SHOWN_NAME_CHARS])
            known = f"served: {', '.join(served)}" if served else "no model is served now"
            raise NotFound(f"model '{asked}' is not served here; {known}", param="model")

    async def _serve(
        self, exchange: Exchange, principal: Principal, endpoint: str, reader: Reader
    ) -> None:
        with self._desk.slot():
            body = await exchange.read_body()
            async with ClientWatch(exchange):
                await self._run(exchange, principal, endpoint, reader, body)

    async def _run(
        self,
        exchange: Exchange,
        principal: Principal,
        endpoint: str,
        reader: Reader,
        body: bytes,
    ) -> None:
        arrived_s = SYSTEM_CLOCK.now_s()
        ask = await _maybe_in_thread(
            len(body) > OFF_LOOP_BODY_BYTES,
            lambda: reader(parse_object(body, self._edge.json_depth)),
        )
        card = self._desk.card()
        self._check_model(ask.model)
        request_id = new_request_id()
        exchange.extra.append((b"x-request-id", request_id.encode()))
        record = RequestRecord(
            request_id, principal.tenant, principal.domain, endpoint, SYSTEM_CLOCK.wall_s()
        )
        files = await self._files(ask, record)
        prompt = await self._prompt(ask, card, request_id)
        placed = await self._place(prompt, files, card, principal.domain)
        request = await self._request(request_id, ask, prompt, placed, card, principal.domain)
        record.prompt_tokens = request.n_tokens
        record.mode = request.mode.value
        record.stage("tokenise_s", SYSTEM_CLOCK.now_s() - arrived_s)
        ticket = self._desk.accept(request, card, record, arrived_s, placed.files)
        exchange.accepted = True
        telling = Telling(exchange, ticket, prompt.make_speaker, arrived_s)
        try:
            if ask.stream:
                reason = await telling.stream(self._settings.keepalive_s)
            else:
                reason = await telling.plain()
            ticket.end(RequestEvent.FINISH, reason.value)
            await telling.conclude(ask.stream)
        except (asyncio.CancelledError, Cancelled):
            ticket.end(RequestEvent.CLIENT_GONE, "cancelled")
            raise
        except HeadraceError as error:
            ticket.end(RequestEvent.ERROR, error.code)
            raise
        except BaseException:
            ticket.end(RequestEvent.ERROR, HeadraceError.code)
            raise

    def _check_model(self, name: str) -> None:
        Limit("model", 1, self._edge.model_name_chars, "characters").at_most(len(name))
        self.check_served(name)

    async def _prompt(self, ask: Ask, card: ModelCard, request_id: RequestId) -> Prompt:
        large = ask.prompt_chars > OFF_LOOP_CHARS
        least = self._protocols.vocabulary.least_tokens(ask.prompt_chars)
        most = min(self._edge.prompt_tokens, card.max_position_tokens)
        if least > most:
            name = "prompt" if ask.chat is None else "messages"
            raise LimitExceeded(
                f"{name} may have at most {most} tokens, got at least {least}",
                param=name,
                code="context_length_exceeded",
            )
        if ask.chat is not None:
            chat = ask.chat
            made = await _maybe_in_thread(large, lambda: self._protocols.chat_prompt(chat))
            tokenizer = self._protocols.tokenizer
            speaker = partial(made.speaker, request_id, ask.model, tokenizer, ask.include_usage)
            return Prompt(made.token_ids, made.temperature, made.top_p, speaker)
        speak = self._protocols.completion_speaker
        speaker = partial(speak, request_id, ask.model, ask.stop, ask.include_usage)
        vocabulary = self._protocols.vocabulary
        if isinstance(ask.prompt, str):
            text = ask.prompt
            ids = await _maybe_in_thread(large, lambda: vocabulary.encode_plain(text))
            ids.insert(0, card.bos_token_id)
        else:
            assert ask.prompt is not None
            ids = ask.prompt
            placeholders = vocabulary.special - {card.bos_token_id, card.eos_token_id}
            check_prompt_ids(ids, card.vocab_size, placeholders | {card.image_token_id})
        return Prompt(ids, ask.temperature, ask.top_p, speaker)

    async def _files(self, ask: Ask, record: RequestRecord) -> tuple[PictureFile, ...]:
        """The request's pictures, fetched if need be. Raises `InvalidRequest` naming the place."""
        if not ask.images:
            return ()
        limits = ImageLimits()
        limits.check_count(len(ask.images))
        begun_s = SYSTEM_CLOCK.now_s()
        fetched = await self._fetcher.fetch(ask.images)
        if fetched:
            record.stage("fetch_s", SYSTEM_CLOCK.now_s() - begun_s)
        return await asyncio.to_thread(open_files, ask.images, limits, fetched)

    async def _place(
        self, prompt: Prompt, files: Sequence[PictureFile], card: ModelCard, domain: str
    ) -> Placed:
        """The prompt with its pictures. Raises `Unavailable` before a vision replica was seen."""
        if not files:
            return Placed(prompt.token_ids)
        vision = self._desk.vision_card()
        root = root_digest(card.namespace().digest(), self._salts.salt(domain))
        return await asyncio.to_thread(
            place_pictures, prompt.token_ids, card.image_token_id, files, vision, root
        )

    async def _request(
        self,
        request_id: RequestId,
        ask: Ask,
        prompt: Prompt,
        placed: Placed,
        card: ModelCard,
        domain: str,
    ) -> GenRequest:
        ids = placed.token_ids
        edge = self._edge
        Limit("prompt", 1, edge.prompt_tokens, "tokens").at_most(len(ids))
        max_tokens = resolve_max_tokens(
            ask.max_tokens,
            len(ids),
            card.max_position_tokens,
            self._settings.default_max_tokens,
            edge.completion_tokens,
        )
        exactness = self._deployment.exactness
        salt = self._salts.salt(domain)
        root = root_digest(card.namespace(exactness).digest(), salt)
        exact_root = root_digest(card.namespace().digest(), salt)
        digests: tuple[Digest, ...] = await _maybe_in_thread(
            len(ids) > OFF_LOOP_TOKENS, lambda: span_block_digests(root, ids, placed.spans)
        )
        seed = secrets.randbits(62) if ask.seed is None else ask.seed
        return GenRequest(
            request_id=request_id,
            epoch=0,
            token_ids=ids,
            chain_root=root,
            digests=digests,
            keep_tokens=self._deployment.keep_for(card.geometry),
            max_tokens=max_tokens,
            sampling=Sampling(prompt.temperature, prompt.top_p, seed),
            stop_token_ids=(card.eos_token_id,),
            mode=self._deployment.handoff_mode,
            domain=domain,
            deadline_s=edge.request_deadline_s,
            images=placed.spans,
            exact_root=None if exactness == "exact" else exact_root,
        )


class Telling:
    """Says a ticket's pieces to the client as they come."""

    def __init__(
        self, exchange: Exchange, ticket: Ticket, make_speaker: MakeSpeaker, arrived_s: float
    ) -> None:
        self._exchange = exchange
        self._ticket = ticket
        self._make_speaker = make_speaker
        self._speaker = make_speaker()
        self._arrived_s = arrived_s
        self._last_s = 0.0  # of the last tokens
        self._first_s = 0.0
        self._last_payloads: list[bytes] = []

    async def stream(self, keepalive_s: float) -> FinishReason:
        """Streams everything but the last events, which `conclude` sends."""
        sent = False
        while True:
            piece = await self._ticket.next(keepalive_s)
            if not piece.token_ids and piece.finish is None and not piece.restart:
                await self._exchange.comment()
                continue
            payloads = self._take(piece)
            reason = self._reason(piece)
            if payloads and reason is None:
                await self._deliver(payloads)
                if not sent:
                    sent = True
                    self._ticket.byte_sent()
            if reason is not None:
                self._last_payloads = payloads + self._speaker.finish(reason, self._usage())
                return reason

    async def plain(self) -> FinishReason:
        while True:
            piece = await self._ticket.next(60.0)
            self._take(piece)
            reason = self._reason(piece)
            if reason is not None:
                self._speaker.finish(reason, self._usage())
                return reason

    async def conclude(self, streamed: bool) -> None:
        """The end of the answer, after the ticket's own end: nothing is held while it is sent."""
        if streamed:
            await self._exchange.end_events(self._last_payloads, done=True)
        else:
            await self._exchange.answer(
                200, self._speaker.whole(), [(b"content-type", b"application/json")]
            )

    def _take(self, piece: Piece) -> list[bytes]:
        record = self._ticket.record
        if piece.restart:
            self._speaker = self._make_speaker()
            self._last_s = 0.0
            record.token_gap_mean_s = record.token_gap_max_s = 0.0
            return []
        if not piece.token_ids:
            return []
        now_s = SYSTEM_CLOCK.now_s()  # uvloop's own clock moves in milliseconds
        if self._last_s == 0.0:
            self._first_s = now_s
            record.stages["first_token_s"] = now_s - self._arrived_s
        else:
            record.token_gap_max_s = max(record.token_gap_max_s, now_s - self._last_s)
        self._last_s = now_s
        payloads = self._speaker.push(piece.token_ids)
        record.completion_tokens = n_tokens = self._speaker.n_tokens
        if n_tokens > 1:
            record.token_gap_mean_s = (now_s - self._first_s) / (n_tokens - 1)
        return payloads

    def _reason(self, piece: Piece) -> FinishReason | None:
        return FinishReason.STOP if self._speaker.stopped else piece.finish

    def _usage(self) -> Usage:
        record = self._ticket.record
        return Usage(record.prompt_tokens, self._speaker.n_tokens, self._ticket.cached_tokens)

    async def _deliver(self, payloads: list[bytes]) -> None:
        begun_s = SYSTEM_CLOCK.now_s()
        await self._exchange.events(payloads)
        self._ticket.record.stage("delivery_s", SYSTEM_CLOCK.now_s() - begun_s)


class ClientWatch:
    """While inside, a client that leaves cancels the task; outside that shows as `Cancelled`.

    uvicorn's `send` never tells of a client that is gone: only a `receive` that waits does."""

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange
        self._cancelled = False

    async def __aenter__(self) -> None:
        self._task = asyncio.current_task()
        self._watch = asyncio.create_task(self._exchange.gone())
        self._watch.add_done_callback(self._on_gone)

    async def __aexit__(self, kind: type[BaseException] | None, error: object, _: object) -> None:
        self._watch.remove_done_callback(self._on_gone)
        self._watch.cancel()
        if self._cancelled and self._task is not None:
            self._task.uncancel()
            if kind is asyncio.CancelledError:
                raise Cancelled("the client left") from None

    def _on_gone(self, _: asyncio.Task[None]) -> None:
        if self._exchange.left and self._task is not None:
            self._cancelled = True
            self._task.cancel()


async def _maybe_in_thread(large: bool, work: Callable[[], T]) -> T:
    return await asyncio.to_thread(work) if large else work()
