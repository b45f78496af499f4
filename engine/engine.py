"""One replica's engine: admission, fills, the step loop and its accounts behind one class."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from headrace.core.card import ModelCard
from headrace.core.chain import BLOCK_TOKENS
from headrace.core.clock import SYSTEM_CLOCK, Clock
from headrace.core.ids import Digest, JobKey
from headrace.core.images import ImageSpan
from headrace.core.rows import Geometry, RowPlan, StartKind
from headrace.engine.admission import ModelLimits
from headrace.engine.blocks import BlockPool
from headrace.engine.fills import FillGuard
from headrace.engine.jobs import Admission, EngineStats, Event, Fill, Job
from headrace.engine.lease import Resources, SlotPool
from headrace.engine.parking import Parking, check_moment, open_block
from headrace.engine.pictures import PictureRows, check_pictures, unpack_pictures
from headrace.engine.runner import Runner
from headrace.engine.scheduler import Scheduler
from headrace.engine.sequence import SequenceState
from headrace.engine.settings import EngineSettings, Half
from headrace.model import (
    CacheLayout,
    KvState,
    Trunk,
    model_card,
    restore_state,
    unpack_state,
)

_MEASURED_STEPS = 32

Buffer = bytes | bytearray | memoryview


class Engine:
    """Runs the rows of admitted sequences. NOT thread-safe: everything from the thread that owns
    it, except `write_fill` and `filling`.

    A sequence's life: `admit` -> fills -> `start` -> events of `step` -> `release`. `release` is
    due exactly once for every admission, whatever happened in between.

    `poison`: fill every block and slot with NaN before it is handed out, so that a read of bytes
    that were never written shows in the logits (tests)."""

    def __init__(
        self,
        model: Trunk,
        settings: EngineSettings,
        half: Half,
        *,
        record_spacing_tokens: int,
        clock: Clock = SYSTEM_CLOCK,
        poison: bool = False,
        backtrack_rows: int = 6,
        ring_rows: int | None = None,
    ) -> None:
        """Raises `ConfigError` for rings that hold less than a window and a verify step."""
        config = model.config
        self.model = model
        self.settings = settings
        self.half = half
        self.geometry = Geometry(
            config.sliding_window, config.n_encoder_layers, config.n_decoder_layers
        )
        self.state = KvState(
            config,
            CacheLayout.of(config, backtrack_rows, ring_rows=ring_rows),
            settings.n_blocks,
            settings.n_slots,
            model.numerics,
            model.device,
            poison=poison,
            encoder_only=model.encoder_only,
        )
        self.runner = Runner(model, self.state, clock)
        self._resources = Resources(
            BlockPool(settings.n_blocks, self.state.poison_block if poison else None),
            SlotPool(settings.n_slots, self.state.poison_slot if poison else None),
            FillGuard(),
        )
        self.scheduler = Scheduler(
            settings,
            half,
            self.geometry,
            ModelLimits(config.vocab_size, config.max_position_embeddings),
            self._resources,
            record_spacing_tokens,
        )
        self.parking = Parking(self.state, self.runner, self.scheduler)
        self._steps = 0
        self._recent: deque[tuple[int, float]] = deque(maxlen=_MEASURED_STEPS)

    def card(self, name: str) -> ModelCard:
        """What this engine's replica announces of its model under `name`."""
        model = self.model
        return model_card(name, model.config, self.state.layout, model.weights_id, model.precision)

    # ---- sequences -------------------------------------------------------------------------

    def resident_blocks(self, digests: Iterable[Digest]) -> int:
        """Length, in blocks, of the longest prefix that is resident now. An admission with
        `hit_blocks` of at least that shares these; later ones may find less."""
        return self._resources.blocks.resident_prefix(digests)

    def admit(self, job: Job) -> Admission | None:
        """Reserve all blocks for N + max_tokens (FULL) or floor(N) (ENCODER) and one state slot;
        None = no room now, try again after a release.

        Raises `InvalidRequest` if it can never fit, `ValueError` for a key already admitted."""
        return self.scheduler.admit(job)

    def write_fill(self, fill: Fill, payload: Buffer) -> bool:
        """Copy a block's bytes into its reserved place; from any thread. False: the sequence was
        released or started meanwhile and nothing was written, or what was written does not count.

        Raises `StateError` when `payload` has not exactly `block_bytes` bytes."""
        guard = self._resources.guard
        if not guard.enter(fill.ticket, fill.block):
            return False
        complete = False
        try:
            self.state.write_block(fill.block, payload)
            complete = True
        finally:
            counts = guard.leave(fill.ticket, fill.block, complete=complete)
        return counts

    @contextmanager
    def filling(self, fill: Fill) -> Iterator[BlockWriter | None]:
        """Write a reserved block; from any thread. On a CPU engine the view is the block itself,
        else host memory that is copied over when the block is complete.

            with engine.filling(fill) as writer:
                if writer is not None and read_into(place, fill.digest, writer.view):
                    writer.complete = True

        None: the sequence is gone. The view must not be used after the block; the block is not
        handed to another sequence before that, whatever is released meanwhile. Afterwards
        `complete` says whether what was written counts, as `write_fill` answers."""
        guard = self._resources.guard
        if not guard.enter(fill.ticket, fill.block):
            yield None
            return
        on_cpu, complete = self.state.device.type == "cpu", False
        try:
            own = memoryview(bytearray(0 if on_cpu else self.state.layout.block_bytes))
            writer = BlockWriter(self.state.block_view(fill.block) if on_cpu else own)
            yield writer
            if writer.complete and not on_cpu:
                self.state.write_block(fill.block, own)
            complete = writer.complete
        finally:
            counts = guard.leave(fill.ticket, fill.block, complete=complete)
        writer.complete = complete and counts

    def start(
        self,
        key: JobKey,
        plan: RowPlan,
        window: Buffer | None = None,
        pictures: PictureRows | None = None,
    ) -> bool:
        """Let the rows of `plan` run. All fills below `plan.write_floor` are done and none is in
        flight; `window` is the record at `plan.window_position` when `plan.kind` is WINDOW;
        `pictures` has the rows (`unpack_pictures`) of every span with a row in the plan.

        A smaller hit than admitted is legal (damaged fill): blocks from the write floor on are
        then computed here. False: the sequence was released or failed meanwhile. Raises
        `ValueError` for a plan, window, picture or fill that does not fit and `Overloaded` as
        `Scheduler.start` tells; nothing changed then."""
        needs_window = plan.kind is StartKind.WINDOW and plan.encoder_rows > 0
        size = self.state.layout.window_record_bytes
        if needs_window and (window is None or len(window) != size):
            raise ValueError(f"{key}: a start from a window needs its record of {size} bytes")
        request = self.scheduler.request(key)
        if request is not None:
            check_pictures(request, plan, pictures or {}, self.model)
        sequence = self.scheduler.start(key, plan)
        if sequence is None:
            return False
        lease = sequence.lease
        if needs_window and window is not None:
            self.state.write_window(lease.slot, plan.window_position, window)
        spans = sequence.request.images
        self.runner.open(lease.slot, sequence.ids, lease.blocks, spans, pictures)
        return True

    def unpack_pictures(
        self, spans: Sequence[ImageSpan], payloads: Mapping[Digest, Buffer]
    ) -> PictureRows:
        """The rows of `spans` from the payloads of their `mm` objects, for `start`; from any
        thread.

        Raises `PicturesMissing` without one of them, and for one that is not exactly the rows of
        its span."""
        return unpack_pictures(self.model, spans, payloads)

    def adopt(self, key: JobKey, payload: Buffer, ran: RowPlan | None = None) -> bool:
        """Instead of `start`: take over a state, with all complete blocks below it filled. One
        that `export_state` of another engine made at N brings its first token, which comes as an
        ordinary event; of a sequence with generated tokens it is what `parking.hold` gave after as
        many, in a run by the plan `ran`.

        False: the sequence is gone. Raises `ValueError` for a state of another moment, `StateError`
        for one of another layout or numerics, `ValueError` when a block is not filled; the
        sequence can still be started then."""
        found = unpack_state(payload)
        sequence = self.scheduler.sequence(key)
        if sequence is None:
            return False
        if sequence.generated:
            check_moment(found, len(sequence.ids) - 1, sequence)
        elif found.slot.length_tokens != sequence.request.n_tokens:
            raise ValueError(f"{key}: a state at {found.slot.length_tokens} tokens")
        slot, block = sequence.lease.slot, open_block(sequence, found.slot.length_tokens)
        restore_state(self.state, slot, found, block)
        if self.scheduler.adopt(key, found.anchor, ran) is None:
            return False
        self.runner.open(slot, sequence.ids, sequence.lease.blocks, sequence.request.images, {})
        return True

    def export_state(self, key: JobKey) -> bytes:
        """Everything of a sequence beyond its complete blocks, as of the rows that ran, and its
        newest token: what another engine needs to `adopt` it. Changes nothing.

        Raises `ValueError` unless a token was sampled and the sequence is not released."""
        sequence = self.scheduler.sequence(key)
        if sequence is None or not sequence.generated:
            raise ValueError(f"{key}: no state to export")
        return self.parking.export(sequence)

    def release(self, key: JobKey) -> None:
        """Close the sequence's lease; idempotent, in any state, also in the middle of its rows.

        The slot is free at once. Blocks with a committed digest stay resident and evictable,
        others are free; those with a fill in flight follow when it ends."""
        sequence = self.scheduler.release(key)
        if sequence is not None and sequence.lease.slot >= 0:
            self.runner.close(sequence.lease.slot)

    # ---- the loop --------------------------------------------------------------------------

    def step(self) -> tuple[Event, ...]:
        """Run the next rows; () when idle. Raises `EngineDamaged` only."""
        if events := self.scheduler.take_pending():
            return events  # alone: an adopted token does not wait for the rows after it
        plan = self.scheduler.plan()
        if plan is None:
            return ()
        self.runner.expect(self.scheduler.ahead(plan))
        result = self.runner.run(plan)
        self._steps += 1
        self._recent.append((result.encoder_rows, result.seconds))
        return self.scheduler.advance(result)

    @property
    def has_work(self) -> bool:
        """Whether `step` would run rows or deliver events."""
        return self.scheduler.has_work

    def block_view(self, block: int) -> memoryview:
        """Zero-copy bytes of a block named by `BlockDone`; CPU only. Read them before the
        sequence is released."""
        return self.state.block_view(block)

    # ---- accounts --------------------------------------------------------------------------

    def stats(self) -> EngineStats:
        """A snapshot of what is held and what was run."""
        self._resources.reclaim()
        pool, totals = self._resources.blocks, self.scheduler.totals
        sequences = list(self.scheduler.sequences())
        rows = sum(count for count, _ in self._recent)
        seconds = sum(duration for _, duration in self._recent)
        running = (SequenceState.KNOWN, SequenceState.DECODING)
        parked = (SequenceState.HELD, SequenceState.PARKED)
        return EngineStats(
            waiting=sum(s.state is SequenceState.FILLING for s in sequences),
            running=sum(s.state in running for s in sequences),
            parked=sum(s.state in parked for s in sequences),
            backlog_rows=sum(s.rows_left for s in sequences),
            free_blocks=pool.n_available,
            resident_blocks=pool.n_evictable,
            held_blocks=pool.n_blocks - pool.n_available,
            free_slots=self._resources.slots.n_free,
            resident_tokens=sum(
                max(s.next_row, min(s.hit_blocks * BLOCK_TOKENS, len(s.ids))) for s in sequences
            ),
            steps=self._steps,
            rows_per_s=rows / seconds if seconds > 0 else 0.0,
            encoder_rows_total=totals.encoder_rows,
            decoder_rows_total=totals.decoder_rows,
            late_events=totals.late_events,
        )

    def check_integrity(self) -> None:
        """Raises `EngineDamaged` unless free + held + resident blocks are all blocks and every
        reference belongs to an open lease, and the same for slots."""
        self._resources.reclaim()
        leases = [s.lease for s in self.scheduler.sequences()]
        self._resources.blocks.check([block for lease in leases for block in lease.blocks])
        self._resources.slots.check([lease.slot for lease in leases if lease.slot >= 0])


class BlockWriter:
    """A reserved block while it is written: `view` is its writable bytes; set `complete` when all
    of them are there and good."""

    __slots__ = ("complete", "view")

    def __init__(self, view: memoryview) -> None:
        self.view = view
        self.complete = False
