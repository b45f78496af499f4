"""A prefill, a decode and an `all` engine of one checkpoint in one process.

Blocks and window records pass through a `Session`, a store of bytes by content address, as they do
between the roles of a cluster; rows are planned by the same functions (`core.rows`). The three
engines have other step, ring and block sizes, so that nothing is equal by being the same code path.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from io import BytesIO
from itertools import count

import numpy as np
import torch
from grid import Case
from PIL import Image

from headrace.core.chain import BLOCK_TOKENS, TokenIds, as_token_ids
from headrace.core.deployment import Deployment
from headrace.core.ids import Digest, JobKey, RequestId
from headrace.core.images import ImageSpan, read_header, span_block_digests
from headrace.core.request import GenRequest, HandoffMode, Sampling
from headrace.core.rows import RowPlan, StartKind, plan_decode, plan_prefill, wants_prefill
from headrace.engine import (
    BlockDone,
    Engine,
    EngineSettings,
    Event,
    Half,
    Job,
    RowsDone,
    SequenceFailed,
    TokenSampled,
    WindowDone,
    resolve_numerics,
    spans_to_run,
)
from headrace.model import ServedModel
from headrace.model.training.chat import Encoder, Turn, conversation
from headrace.model.training.data import span_tokens
from headrace.vision import ImageEncoder

N_SLOTS = 20
SPARE_TOKENS = 4  # an answer may be so much longer than the wanted one before it is cut
_ROOT = Digest(bytes(32))
_roots = count()


def _fresh_root() -> Digest:
    """Where chains begin that share no block with any made before."""
    return Digest(hashlib.sha256(b"root %d" % next(_roots)).digest())


@dataclass(frozen=True)
class Prompt:
    """What an engine is asked: `pictures` are files by their digest, in the order of `spans`."""

    ids: TokenIds
    spans: tuple[ImageSpan, ...]
    pictures: tuple[bytes, ...]
    wanted: str
    max_tokens: int

    def cut(self, n_tokens: int) -> Prompt:
        """Its first `n_tokens`, for one token. Raises `ValueError` inside a picture."""
        if any(s.start < n_tokens < s.end for s in self.spans):
            raise ValueError(f"n_tokens: found {n_tokens}, inside a picture")
        kept = tuple(s for s in self.spans if s.end <= n_tokens)
        return Prompt(self.ids[:n_tokens], kept, self.pictures[: len(kept)], "", 1)

    @property
    def key(self) -> tuple[bytes, tuple[bytes, ...]]:
        return self.ids.tobytes(), tuple(s.digest for s in self.spans)


@dataclass
class Answer:
    """Tokens with the stop id, and the logits that each was drawn from. Rows are decode's, of the
    prompt; `hit_tokens` what it found stored, `found_tokens` what prefill (or decode, where no
    prefill ran) found before this request."""

    tokens: list[int] = field(default_factory=list)
    logits: list[torch.Tensor] = field(default_factory=list)
    encoder_rows: int = 0
    hit_tokens: int = 0
    found_tokens: int = 0
    start_kind: str = ""


@dataclass(frozen=True)
class Difference:
    """Of two answers: equal tokens before the first difference, the largest difference of a logit
    up to there, and whether all bits of tokens and logits are equal."""

    equal_tokens: int
    logits: float
    same_bits: bool


def compare(one: Answer, other: Answer) -> Difference:
    same = [a == b for a, b in zip(one.tokens, other.tokens, strict=False)]
    equal = same.index(False) if False in same else len(same)
    rows = list(zip(one.logits, other.logits, strict=False))[: equal + 1]
    far = 0.0
    for a, b in rows:
        finite = torch.isfinite(a)  # ids that are never drawn have -inf
        far = max(far, float((a - b)[finite].abs().max()))
    bits = one.tokens == other.tokens and all(torch.equal(a, b) for a, b in rows)
    return Difference(equal, far, bits)


class Pools:
    """The engines of one checkpoint; memory grows with `n_blocks` blocks of each."""

    def __init__(
        self, model: str, numerics: str = "invariant", *, n_blocks: int = 400, poison: bool = False
    ) -> None:
        served = ServedModel(Deployment(model=model, numerics=numerics))
        kind = resolve_numerics(numerics, "cpu")
        self.config = served.config()
        self.tokenizer = served.tokenizer()
        self.encoder = Encoder(self.tokenizer, self.config.image_token_id, span_tokens(self.config))
        self.images = ImageEncoder(served.vision(kind, "cpu")[0])
        self._rows: dict[Digest, bytes] = {}
        self._n_blocks, self._poison = n_blocks, poison
        self._trunk = served.trunk(kind, "cpu")
        self._half = served.trunk(kind, "cpu", encoder_only=True)
        self.all = self.engine(Half.FULL, backtrack_rows=6, rows=512)
        self.prefill = self.engine(Half.ENCODER, backtrack_rows=3, rows=333)
        self.decode = self.engine(Half.FULL, backtrack_rows=9, rows=205)
        self.geometry = self.all.geometry
        self.window_tokens = self.geometry.window_tokens

    def engine(
        self,
        half: Half,
        *,
        backtrack_rows: int,
        rows: int,
        n_slots: int = N_SLOTS,
        kind: type[Engine] = Engine,
    ) -> Engine:
        """Another engine on these weights; `rows` of one step."""
        settings = EngineSettings(
            n_blocks=self._n_blocks,
            n_slots=n_slots,
            max_rows_per_step=rows,
            replay_rows_per_step=rows,
        )
        return kind(
            self._half if half is Half.ENCODER else self._trunk,
            settings,
            half,
            record_spacing_tokens=8192,
            poison=self._poison,
            backtrack_rows=backtrack_rows,
        )

    # ---- prompts ---------------------------------------------------------------------------

    def prompts(self, case: Case) -> list[Prompt]:
        """One prompt for every turn of a case; the last one's answer is the probe's."""
        turns = case.task.turns
        return [self.prompt(turns[: n + 1], case) for n in range(len(turns))]

    def prompt(self, turns: Sequence[Turn], case: Case) -> Prompt:
        document = conversation(turns, case.task.system)
        wanted = str(document.pieces.pop().content)
        ids, _ = self.encoder.encode(document)
        places = np.flatnonzero(ids == self.config.image_token_id)
        spans, files = [], []
        if len(places):
            assert case.picture is not None and len(places) == self.encoder.span_tokens
            file = BytesIO()
            Image.fromarray(case.picture).save(file, "PNG")
            files.append(file.getvalue())
            digest = self.images.digest(files[0], read_header(files[0], self.images.limits), _ROOT)
            spans.append(ImageSpan(int(places[0]), len(places), digest))
        answer_tokens = len(self.encoder.ids(wanted))
        return Prompt(
            as_token_ids(ids.tolist()),
            tuple(spans),
            tuple(files),
            turns[-1].answer,
            answer_tokens + SPARE_TOKENS,
        )

    def right(self, prompt: Prompt, answer: Answer) -> bool:
        """Whether it ended by itself, word for word as wanted."""
        ended = answer.tokens[-1:] == [self.config.eos_token_id]
        return ended and self.text(answer) == prompt.wanted

    def text(self, answer: Answer) -> str:
        """What was said, without the token that ends an answer."""
        ended = answer.tokens[-1:] == [self.config.eos_token_id]
        said = answer.tokens[:-1] if ended else answer.tokens
        return str(self.tokenizer.decode(said, skip_special_tokens=False))

    def picture_rows(self, prompt: Prompt) -> dict[Digest, bytes]:
        for span, data in zip(prompt.spans, prompt.pictures, strict=True):
            if span.digest not in self._rows:
                self._rows[span.digest] = self.images.encode(data).payload
        return {span.digest: self._rows[span.digest] for span in prompt.spans}

    # ---- runs ------------------------------------------------------------------------------

    def request(
        self, prompt: Prompt, name: str, root: Digest, keep_tokens: int, key_spans: bool = True
    ) -> GenRequest:
        """`key_spans` off leaves the pictures out of the addresses: a fault to be found."""
        spans = prompt.spans if key_spans else ()
        return GenRequest(
            request_id=RequestId(name),
            epoch=0,
            token_ids=prompt.ids,
            chain_root=root,
            digests=span_block_digests(root, prompt.ids, spans),
            keep_tokens=keep_tokens,
            max_tokens=prompt.max_tokens,
            sampling=Sampling(),
            stop_token_ids=(self.config.eos_token_id,),
            mode=HandoffMode.EXACT,
            domain="probes",
            deadline_s=0.0,
            images=prompt.spans,
        )

    def cold(
        self, prompts: Sequence[Prompt], keep_tokens: int, engine: Engine | None = None
    ) -> list[Answer]:
        """The `all` engine, nothing stored: what everything else is compared with."""
        parts = []
        for number, prompt in enumerate(prompts):
            root = _fresh_root()
            request = self.request(prompt, f"c{number}", root, keep_tokens)
            plan = plan_decode(request.n_tokens, 0, keep_tokens, (), self.geometry)
            parts.append(Part(request, prompt, plan))
        run(self, engine or self.all, parts, {})
        return [part.answer for part in parts]


@dataclass
class Part:
    """One request in one engine: what goes in, and what came out. `digests` of complete blocks by
    number, those of the answer too; `windows` by position."""

    request: GenRequest
    prompt: Prompt
    plan: RowPlan
    hit_blocks: int = 0
    window: bytes | None = None
    answer: Answer = field(default_factory=Answer)
    digests: dict[int, Digest] = field(default_factory=dict)
    blocks: dict[Digest, bytes] = field(default_factory=dict)
    windows: dict[int, bytes] = field(default_factory=dict)


class Session:
    """One namespace: an empty store, and chains of its own. `depth_tokens`: mode `replay`."""

    def __init__(
        self,
        pools: Pools,
        keep_tokens: int,
        depth_tokens: int | None = None,
        *,
        key_spans: bool = True,
    ) -> None:
        """`key_spans` off leaves pictures out of the addresses: a fault that a probe must find."""
        self.pools, self.keep_tokens, self.depth_tokens = pools, keep_tokens, depth_tokens
        self._key_spans = key_spans
        self._root = _fresh_root()
        self.blocks: dict[Digest, bytes] = {}
        self.windows: dict[Digest, bytes] = {}  # by the digest of the block that ends there

    def ask(self, prompts: Sequence[Prompt], local_prefill_rows: int = 0) -> list[Answer]:
        """All prompts at once: each is looked up, prefilled where more rows than that would run,
        handed over and answered; what was made is stored afterwards."""
        pools, geometry, depth = self.pools, self.pools.geometry, self.depth_tokens
        requests = [
            pools.request(p, f"s{n}", self._root, self.keep_tokens, self._key_spans)
            for n, p in enumerate(prompts)
        ]
        found, halves = [], []
        for request, prompt in zip(requests, prompts, strict=True):
            hit, windows = self._look_up(request)
            found.append(hit)
            n, keep = request.n_tokens, request.keep_tokens
            plan = plan_decode(n, hit, keep, windows, geometry, depth_tokens=depth)
            if not wants_prefill(plan, n, keep, local_prefill_rows):
                continue
            plan = plan_prefill(n, hit, keep, windows, geometry, depth_tokens=depth)
            if plan.encoder_rows:
                halves.append(self._part(request, prompt, plan, hit))
        run(pools, pools.prefill, halves, self.blocks)
        self._store(halves)
        wholes = []
        for request, prompt, before in zip(requests, prompts, found, strict=True):
            hit, windows = self._look_up(request)
            n, keep = request.n_tokens, request.keep_tokens
            plan = plan_decode(n, hit, keep, windows, geometry, depth_tokens=depth)
            wholes.append(self._part(request, prompt, plan, hit))
            wholes[-1].answer.hit_tokens = hit
            wholes[-1].answer.found_tokens = before
            wholes[-1].answer.start_kind = str(plan.kind)
        run(pools, pools.decode, wholes, self.blocks)
        self._store(wholes)
        return [part.answer for part in wholes]

    def digests(self, prompt: Prompt) -> tuple[Digest, ...]:
        """The addresses of a prompt's complete blocks here."""
        return span_block_digests(self._root, prompt.ids, prompt.spans)

    def _look_up(self, request: GenRequest) -> tuple[int, list[int]]:
        """(H, positions of window records up to it)."""
        hit = 0
        while hit < len(request.digests) and request.digests[hit] in self.blocks:
            hit += 1
        ends = [n for n in range(1, hit + 1) if request.digests[n - 1] in self.windows]
        return hit * BLOCK_TOKENS, [n * BLOCK_TOKENS for n in ends]

    def _part(self, request: GenRequest, prompt: Prompt, plan: RowPlan, hit: int) -> Part:
        digests = dict(enumerate(request.digests))
        window = None
        if plan.kind is StartKind.WINDOW:
            window = self.windows[digests[plan.window_position // BLOCK_TOKENS - 1]]
        return Part(request, prompt, plan, hit // BLOCK_TOKENS, window, digests=digests)

    def _store(self, parts: Iterable[Part]) -> None:
        for part in parts:
            self.blocks |= part.blocks
            for position, payload in part.windows.items():
                self.windows[part.digests[position // BLOCK_TOKENS - 1]] = payload


def run(
    pools: Pools, engine: Engine, parts: Iterable[Part], stored: Mapping[Digest, bytes]
) -> None:
    """All parts through one engine, as many at once as it has room for. Engines keep blocks of
    former requests, as replicas do. Raises `ValueError` for a part without room in an empty one,
    and the error of the first sequence that fails."""
    waiting = list(reversed(list(parts)))
    running: dict[JobKey, Part] = {}

    def on_logits(key: JobKey, _position: int, row: torch.Tensor) -> None:
        running[key].answer.logits.append(row.clone())

    engine.runner.on_logits = on_logits
    while waiting or running:
        while waiting and _begin(pools, engine, waiting[-1], stored):
            part = waiting.pop()
            running[part.request.key] = part
        if not running:
            raise ValueError(f"{waiting[-1].request.n_tokens} tokens: no room in an empty engine")
        for event in engine.step():
            if _take(engine, event, running[event.key]):
                engine.release(event.key)
                del running[event.key]


def _begin(pools: Pools, engine: Engine, part: Part, stored: Mapping[Digest, bytes]) -> bool:
    request = part.request
    admission = engine.admit(Job(request, as_token_ids([]), part.hit_blocks))
    if admission is None:
        return False
    for fill in admission.fills:
        assert engine.write_fill(fill, stored[fill.digest])
    spans = spans_to_run(request, part.plan)
    payloads = pools.picture_rows(part.prompt) if spans else {}
    rows = engine.unpack_pictures(spans, payloads)
    assert engine.start(request.key, part.plan, part.window, rows)
    return True


def _take(engine: Engine, event: Event, part: Part) -> bool:
    """Whether the request ended."""
    match event:
        case SequenceFailed(error=error):
            raise error
        case BlockDone(index=index, digest=digest, block=block):
            part.digests[index] = digest
            part.blocks[digest] = bytes(engine.block_view(block))
        case WindowDone(position=position, payload=payload):
            part.windows[position] = payload
        case TokenSampled(token_id=token, finish=finish):
            if not part.answer.tokens:
                part.answer.encoder_rows = event.encoder_rows
            part.answer.tokens.append(token)
            return finish is not None
        case RowsDone():
            return True
    return False
