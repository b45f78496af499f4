"""Replicas that do what a test says: asyncio servers that speak core.peers.

What one answers to a job is the rig's reference text, or whatever the test put into its `script`.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from headrace.core.card import Member, ModelCard, Role
from headrace.core.ids import BootId, JobKey, new_boot_id
from headrace.core.messages import (
    BindDecode,
    Cancel,
    DecodeJob,
    Drain,
    HandoffAck,
    Hello,
    JobFailed,
    LoadReport,
    PrefillDone,
    PrefillJob,
    PrefillProgress,
    StageTimes,
    TokenBatch,
    TokenItem,
)
from headrace.core.peers import Peer, PeerServer, introduce
from headrace.core.request import FinishReason, HandoffBind
from headrace.core.states import ReplicaState
from headrace.kvstore import Beat

CARD = ModelCard(
    name="scripted",
    weights="seed-0",
    layout_id=b"L" * 32,
    numerics="invariant-fp64",
    vocab_size=4096,
    max_position_tokens=16_384,
    window_tokens=8,
    n_encoder_layers=2,
    n_decoder_layers=2,
    block_bytes=1024,
    window_record_bytes=256,
    bos_token_id=0,
    eos_token_id=1,
    image_token_id=4001,
)


@dataclass
class Script:
    """What a scripted replica does with a job. `token_ids` None: the reference text's, cut to
    max_tokens. `gate`: waits before each token (decode), or before asking for a decode replica (0)
    and before being done (1) (prefill)."""

    token_ids: Sequence[int] | None = None
    gate: Callable[[int], asyncio.Event | None] = lambda index: None
    fail: JobFailed | None = None  # instead of an answer; its key is filled in
    fail_after: int = 0
    fail_each: int = 64  # the same, counted from where an attempt began
    hit_tokens: int = 0
    together: int = 1  # tokens a batch
    fatal_tokens: int = 0  # a prompt of this length kills the replica as soon as it arrives


class MortalBeat(Beat):
    async def die(self) -> None:
        """Stop beating without withdrawing, as a killed process does."""
        if self._task is not None:
            self._task.cancel()


class ScriptedReplica:
    """One replica. `jobs`, `cancels` and `running` are what it saw and holds."""

    def __init__(self, rig: Any, role: Role, name: str, card: ModelCard = CARD) -> None:
        self.rig = rig
        self.role, self.name, self.card = role, name, card
        self.boot = new_boot_id()
        self.says: BootId | None = None  # another boot id in its Hello than in its record
        self.script = Script()
        self.jobs: list[DecodeJob | PrefillJob] = []
        self.cancels: list[Cancel] = []
        self.binds: list[BindDecode] = []
        self.running: dict[JobKey, asyncio.Task[None]] = {}
        self.state = ReplicaState.READY
        self.address = ""
        self.n_blocks, self.n_slots = 64, 8
        self._prefilled: dict[JobKey, asyncio.Event] = {}
        self._sources: dict[JobKey, Peer] = {}
        self._bound: dict[JobKey, asyncio.Queue[BindDecode]] = {}
        handlers: dict[type[Any], Callable[[Peer, Any], None]] = {
            DecodeJob: self._on_job,
            PrefillJob: self._on_job,
            BindDecode: self._on_bind,
            Cancel: self._on_cancel,
            Drain: lambda peer, message: None,
            PrefillDone: self._on_done,
        }
        limits = rig.deployment.wire
        self.server = PeerServer(self.hello, handlers, self._on_left, rig.token, limits)
        self._beat: MortalBeat | None = None
        self.dead = False
        self.dying: asyncio.Task[None] | None = None

    def hello(self) -> Hello:
        return Hello(self.role, self.name, self.says or self.boot, "test", self.card)

    def member(self) -> Member:
        return Member(
            role=self.role,
            name=self.name,
            boot_id=self.boot,
            address=self.address,
            pid=os.getpid(),
            build="test",
            state=self.state,
            card=self.card,
            max_rows_per_step=512,
            n_blocks=self.n_blocks,
            n_slots=self.n_slots,
        )

    async def start(self) -> ScriptedReplica:
        self.address = await self.server.listen("tcp://127.0.0.1:0")
        self._beat = MortalBeat(self.rig.board, self.member, self.rig.deployment.leases)
        await self._beat.start()
        return self

    async def announce(self) -> None:
        assert self._beat is not None
        await self._beat.now()

    async def die(self) -> None:
        """As a killed process: sockets close at once, the record runs out by itself."""
        self.dead = True
        if self._beat is not None:
            await self._beat.die()
        for task in self.running.values():
            task.cancel()
        self.running.clear()
        await self.server.close()

    async def fall_silent(self) -> None:
        """As a stopped process: the sockets stay open, nothing is said on them."""
        if self._beat is not None:
            await self._beat.die()
        for task in self.running.values():
            task.cancel()

    async def stop(self) -> None:
        if self._beat is not None:
            await self._beat.stop()
        await self.die()

    def report(self, **values: Any) -> None:
        """Send a load report to every router."""
        base = LoadReport(0, 0, 0, 0, 0, 0, self.n_blocks, self.n_slots, 0.0, 0)
        for peer in self.server.routers():
            peer.post(replace(base, **values))

    def say(self, item: TokenItem) -> None:
        """Send tokens that no job asked for."""
        for peer in self.server.routers():
            peer.post(TokenBatch((item,)))

    def _on_job(self, peer: Peer, job: DecodeJob | PrefillJob) -> None:
        self.jobs.append(job)
        if job.request.n_tokens == self.script.fatal_tokens:
            self.dying = asyncio.create_task(self.die())
            return
        run = self._decode if isinstance(job, DecodeJob) else self._prefill
        task = asyncio.create_task(run(peer, job))  # type: ignore[arg-type]
        self.running[job.request.key] = task
        task.add_done_callback(lambda _: self.running.pop(job.request.key, None))

    def _on_cancel(self, peer: Peer, message: Cancel) -> None:
        self.cancels.append(message)
        task = self.running.pop(message.key, None)
        if task is not None:
            task.cancel()

    def _on_bind(self, peer: Peer, message: BindDecode) -> None:
        self.binds.append(message)
        self._binds_of(message.key).put_nowait(message)

    def _binds_of(self, key: JobKey) -> asyncio.Queue[BindDecode]:
        return self._bound.setdefault(key, asyncio.Queue())

    def _on_left(self, peer: Peer) -> None:
        if peer.hello.role is Role.ROUTER:
            for task in self.running.values():
                task.cancel()

    def _on_done(self, peer: Peer, message: PrefillDone) -> None:
        self._sources[message.key] = peer
        self._done_event(message.key).set()

    def _done_event(self, key: JobKey) -> asyncio.Event:
        return self._prefilled.setdefault(key, asyncio.Event())

    async def _decode(self, peer: Peer, job: DecodeJob) -> None:
        request, script = job.request, self.script
        if job.await_prefill:
            await self._done_event(request.key).wait()
        ids = self.rig.reference_ids if script.token_ids is None else list(script.token_ids)
        ids = ids[: request.max_tokens]
        finish = FinishReason.LENGTH if len(ids) == request.max_tokens else FinishReason.STOP
        begin = len(job.generated_ids)
        assert list(job.generated_ids) == ids[:begin], "resumed after other tokens"
        for index in range(begin, len(ids), script.together):
            if (event := script.gate(index)) is not None:
                await event.wait()
            due = index >= script.fail_after or index - begin >= script.fail_each
            if script.fail is not None and due:
                peer.post(replace(script.fail, key=request.key))
                return
            some = tuple(ids[index : index + script.together])
            peer.post(TokenBatch((TokenItem(request.key, index, some, None, None),)))
            if (source := self._sources.pop(request.key, None)) is not None:
                source.post(HandoffAck(request.key))
            await asyncio.sleep(0)
        if (event := script.gate(len(ids))) is not None:
            await event.wait()
        end = (request.stop_token_ids[0],) if finish is FinishReason.STOP else ()
        times = StageTimes(
            hit_tokens=script.hit_tokens, encoder_rows=7, decoder_rows=5, start_kind="cold"
        )
        peer.post(TokenBatch((TokenItem(request.key, len(ids), end, finish, times),)))

    async def _prefill(self, peer: Peer, job: PrefillJob) -> None:
        """Asks once unless bound early, then tells whoever is bound, until one acknowledges."""
        script, key = self.script, job.request.key
        if (event := script.gate(0)) is not None:
            await event.wait()
        if script.fail is not None:
            peer.post(replace(script.fail, key=key))
            return
        if self.rig.deployment.handoff_bind is HandoffBind.LATE:
            peer.post(PrefillProgress(key, 0, wanted=True))
        n_tokens, hit = job.request.n_tokens, script.hit_tokens
        naming = asyncio.create_task(self._binds_of(key).get())
        try:
            while True:
                bind = await naming
                naming = asyncio.create_task(self._binds_of(key).get())
                if (event := script.gate(1)) is not None:
                    await event.wait()
                done = PrefillDone(bind.decode_key, n_tokens - hit, hit, 0.25)
                if await self._tell(bind.decode_address, done, peer, naming):
                    return
        finally:
            naming.cancel()

    async def _tell(
        self, address: str, done: PrefillDone, router: Peer, naming: asyncio.Task[BindDecode]
    ) -> bool:
        """Whether the decode replica acknowledged; False when it is gone or another is bound."""
        try:
            other = await introduce(address, self.hello(), self.rig.token, self.rig.deployment.wire)
        except ConnectionError:
            return False
        await other.link.send(done)
        router.post(done)
        acknowledged = asyncio.create_task(other.link.receive())
        try:
            await asyncio.wait({acknowledged, naming}, return_when=asyncio.FIRST_COMPLETED)
            return acknowledged.done() and isinstance(acknowledged.result(), HandoffAck)
        finally:
            acknowledged.cancel()
            await other.link.close()
