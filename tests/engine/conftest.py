"""Builders that the tests of this room share: requests, engines, a scheduler without a model."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import pytest
import torch

from headrace.core.chain import as_token_ids
from headrace.core.errors import HeadraceError
from headrace.core.ids import Digest, JobKey, RequestId
from headrace.core.request import FinishReason, GenRequest, Sampling
from headrace.core.rows import Geometry, plan_decode, plan_prefill
from headrace.engine import (
    BlockDone,
    Engine,
    EngineSettings,
    Half,
    Job,
    RowsDone,
    SequenceFailed,
    TokenSampled,
    WindowDone,
)
from headrace.engine.admission import ModelLimits
from headrace.engine.blocks import BlockPool
from headrace.engine.fills import FillGuard
from headrace.engine.lease import Resources, SlotPool
from headrace.engine.plan import SegmentResult, StepPlan, StepResult
from headrace.engine.scheduler import Scheduler
from headrace.model import Numerics, Trunk, load_named

ROOT = Digest(bytes(32))


@pytest.fixture(scope="session")
def t1() -> Trunk:
    torch.set_num_threads(1)
    return load_named("t1", 0, Numerics.INVARIANT)


def make_request(
    prompt: int | Sequence[int],
    *,
    name: str = "r",
    epoch: int = 0,
    keep_tokens: int = 44,
    max_tokens: int = 4,
    sampling: Sampling | None = None,
    stop_token_ids: Sequence[int] = (),
    root: Digest = ROOT,
    seed: int = 3,
) -> GenRequest:
    """`prompt` as a number makes that many seeded ids; equal seeds share their prefix."""
    if isinstance(prompt, int):
        draw = random.Random(seed)
        prompt = [draw.randrange(16, 3900) for _ in range(prompt)]
    ids = as_token_ids(prompt)
    return GenRequest.offline(
        root,
        ids,
        keep_tokens=keep_tokens,
        max_tokens=max_tokens,
        name=RequestId(name),
        epoch=epoch,
        sampling=sampling or Sampling(),
        stop_token_ids=stop_token_ids,
    )


@pytest.fixture(scope="session")
def new_request() -> Callable[..., GenRequest]:
    return make_request


@pytest.fixture
def new_engine(t1: Trunk) -> Callable[..., Engine]:
    """An engine on T1 that poisons what it hands out."""

    def build(half: Half = Half.FULL, *, spacing: int = 8192, **settings: int) -> Engine:
        sizes = {"n_blocks": 16, "n_slots": 4} | settings
        return Engine(t1, EngineSettings(**sizes), half, record_spacing_tokens=spacing, poison=True)

    return build


@dataclass
class Outcome:
    """What one sequence showed until it was released."""

    tokens: list[int] = field(default_factory=list)
    finish: FinishReason | None = None
    blocks: dict[int, bytes] = field(default_factory=dict)
    digests: dict[int, Digest] = field(default_factory=dict)
    windows: dict[int, bytes] = field(default_factory=dict)
    rows: tuple[int, int] = (0, 0)
    error: HeadraceError | None = None


class Session:
    """Admits and starts cold or with resident hits, steps, collects, releases at the end."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.seen: dict[JobKey, Outcome] = {}
        self.open: set[JobKey] = set()

    def begin(
        self,
        request: GenRequest,
        *,
        hit_blocks: int = 0,
        generated: Sequence[int] = (),
        windows: Iterable[int] = (),
        window: bytes | None = None,
    ) -> Outcome:
        engine = self.engine
        admission = engine.admit(Job(request, as_token_ids(generated), hit_blocks))
        assert admission is not None
        assert admission.fills == ()
        maker = plan_decode if engine.half is Half.FULL else plan_prefill
        n, keep = request.n_tokens, request.keep_tokens
        plan = maker(n, hit_blocks * 128, keep, windows, engine.geometry)
        self.seen[request.key] = Outcome()
        self.open.add(request.key)
        assert engine.start(request.key, plan, window)
        return self.seen[request.key]

    def step(self) -> None:
        for event in self.engine.step():
            self.take(event)

    def finish(self) -> None:
        while self.engine.has_work:
            self.step()
        assert not self.open
        self.engine.check_integrity()

    def take(self, event: object) -> None:
        assert isinstance(event, TokenSampled | BlockDone | WindowDone | RowsDone | SequenceFailed)
        one = self.seen[event.key]
        over = False
        match event:
            case BlockDone(index=index, digest=digest, block=block):
                one.blocks[index] = bytes(self.engine.block_view(block))
                one.digests[index] = digest
            case WindowDone(position=position, payload=payload):
                one.windows[position] = payload
            case TokenSampled(token_id=token, finish=finish):
                one.tokens.append(token)
                one.finish = finish
                one.rows = (event.encoder_rows, event.decoder_rows)
                over = finish is not None
            case RowsDone():
                one.rows = (event.encoder_rows, event.decoder_rows)
                over = True
            case SequenceFailed(error=error):
                one.error = error
                over = True
        if over:
            self.engine.release(event.key)
            self.open.remove(event.key)


@pytest.fixture(scope="session")
def new_session() -> Callable[[Engine], Session]:
    return Session


@pytest.fixture(scope="session")
def run_alone() -> Callable[..., Outcome]:
    """One request through an engine from cold to its end."""

    def run(engine: Engine, request: GenRequest) -> Outcome:
        session = Session(engine)
        outcome = session.begin(request)
        session.finish()
        return outcome

    return run


@pytest.fixture
def new_scheduler() -> Callable[..., Scheduler]:
    """A scheduler with the geometry of T1 and no model."""

    def build(half: Half = Half.FULL, *, spacing: int = 8192, **settings: int) -> Scheduler:
        sizes = EngineSettings(**({"n_blocks": 64, "n_slots": 4} | settings))
        resources = Resources(BlockPool(sizes.n_blocks), SlotPool(sizes.n_slots), FillGuard())
        limits = ModelLimits(4096, 4096)
        return Scheduler(sizes, half, Geometry(32, 6, 6), limits, resources, spacing)

    return build


@pytest.fixture(scope="session")
def answer() -> Callable[..., StepResult]:
    """The result of a step in which everything ran and every draw gave `token`."""

    def build(plan: StepPlan, token: int = 5) -> StepResult:
        parts = tuple(
            SegmentResult(
                token_id=token if segment.sampling else None,
                window=b"w" if segment.window else None,
            )
            for segment in plan.segments
        )
        encoder = sum(s.encoder_rows for s in plan.segments)
        decoder = sum(s.decoder_rows for s in plan.segments)
        return StepResult(plan, parts, encoder, decoder, 0, 0.0)

    return build
