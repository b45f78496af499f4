"""Mode `replay`: equal to a reference engine that does the same replay; approximate bytes live in a
namespace of their own."""

from __future__ import annotations

import asyncio
import dataclasses
import shutil
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest

from headrace.core.chain import as_token_ids, block_digests
from headrace.core.ids import Digest, RequestId
from headrace.core.request import GenRequest, HandoffMode
from headrace.core.rows import StartKind, floor_grain, plan_decode, plan_prefill
from headrace.engine import BlockDone, Engine, EngineSettings, Half, Job, TokenSampled, WindowDone
from headrace.kvstore import IndexReader, Kind, StoreClient
from headrace.kvstore.layout import SlotHeader
from headrace.kvstore.workshop.directory import StoreDirectory
from headrace.kvstore.workshop.garbage import Wishes
from headrace.kvstore.workshop.repair import find_garbage
from headrace.model import Numerics, load_named

MODEL = "t1"
DEPLOYMENT = {"handoff_mode": HandoffMode.REPLAY}
DEPTHS = {"W": 32, "2W": 64, "exact": 186}
pytestmark = pytest.mark.asyncio(loop_scope="module")


class Reference:
    """One engine a run, no store and no roles; blocks pass as bytes by their number."""

    def __init__(self) -> None:
        self._trunk = load_named(MODEL, 0, Numerics.INVARIANT)

    def run(
        self,
        ids: Sequence[int],
        hit: dict[int, bytes],
        depth: int,
        half: Half = Half.FULL,
        max_tokens: int = 1,
    ) -> tuple[list[int], dict[int, bytes], StartKind]:
        """(tokens, blocks that were hit or made, kind of the start)."""
        engine = Engine(
            self._trunk,
            EngineSettings(n_blocks=16, n_slots=1),
            half,
            record_spacing_tokens=8192,
            poison=True,
        )
        root, known = Digest(bytes(32)), as_token_ids(list(ids))
        request = GenRequest.offline(root, known, keep_tokens=44, max_tokens=max_tokens)
        admission = engine.admit(Job(request, as_token_ids([]), len(hit)))
        assert admission is not None
        for fill in admission.fills:
            engine.write_fill(fill, hit[fill.index])
        make = plan_decode if half is Half.FULL else plan_prefill
        plan = make(len(ids), len(hit) * 128, 44, (), engine.geometry, depth_tokens=depth)
        engine.start(request.key, plan)
        tokens, blocks = [], dict(hit)
        while engine.has_work:
            for event in engine.step():
                assert not (isinstance(event, WindowDone) and plan.kind is StartKind.BOUNDED)
                if isinstance(event, BlockDone):
                    blocks[event.index] = bytes(engine.block_view(event.block))
                if isinstance(event, TokenSampled):
                    tokens.append(event.token_id)
        return tokens, blocks, plan.kind


@pytest.fixture(scope="module")
def reference() -> Reference:
    return Reference()


async def exact_client(cluster: Any) -> StoreClient:
    client: StoreClient = cluster.prefill.stores.exact
    assert client is not cluster.prefill.store and client.connected
    return client


def objects_by_namespace(client: StoreClient) -> Counter[bytes]:
    """Every sealed object of the arena, whatever its kind, counted by the namespace it names."""
    _, arena = client._mapped
    slots = ((region, slot) for region in arena.regions for slot in range(region.slots))
    headers = (SlotHeader.unpack(bytes(arena.header(*slot))) for slot in slots)
    return Counter(header.facts.namespace for header in headers if header is not None)


async def test_two_turns_equal_the_reference_and_no_byte_is_exact(
    cluster, yardstick, prompt, reference, valkey
) -> None:
    exact_name = cluster.card.namespace().digest()
    own_name = cluster.card.namespace("replayed").digest()
    before = objects_by_namespace(cluster.prefill.store)
    ids = prompt(640, "replayed")
    request = cluster.request(ids, 12)
    assert request.exact_root not in (None, request.chain_root)
    _, made, kind = reference.run(ids, {}, 32, Half.ENCODER)
    assert kind is StartKind.COLD and len(made) == 5
    expected, after, kind = reference.run(ids, made, 32, max_tokens=12)
    assert kind is StartKind.BOUNDED

    call = await cluster.handoff(request)
    answer = await call.result()
    assert list(answer) == expected
    assert (call.times.start_kind, call.times.exactness) == (StartKind.BOUNDED, "replayed")
    assert call.times.encoder_rows == 640 - (596 - 32) and call.times.decoder_rows == 44
    await cluster.at_rest()
    await cluster.written()

    # The second turn goes on from the tainted block, and taints what follows.
    second = [*ids, *answer, *prompt(150, "and on")]
    _, handed, kind = reference.run(second, after, 32, Half.ENCODER)
    assert kind is StartKind.BOUNDED and len(handed) == 6
    expected, _, _ = reference.run(second, handed, 32, max_tokens=6)
    call = await cluster.handoff(cluster.request(second, 6), decode=1)
    assert list(await call.result()) == expected
    assert call.prefilled.hit_tokens == floor_grain(651) == 640
    assert call.times.hit_tokens == 768 and call.times.exactness == "replayed"
    await cluster.at_rest()
    await cluster.written()

    exact, request = await exact_client(cluster), cluster.request(second)
    digests = request.exact_digests(request.token_ids)
    assert await exact.open_prefix(digests, None) == ()
    assert len(await cluster.prefill.store.open_prefix(request.digests, None)) == 6
    # Neither namespace answers to the other's keys, and no window record was made in either.
    assert await exact.open_prefix(request.digests, None) == ()
    for store, keys in ((exact, digests), (cluster.prefill.store, request.digests)):
        assert await store.open_windows([(0, digest) for digest in keys], None) is None
    # The arena itself holds six more objects, and all of them name the replayed namespace.
    after = objects_by_namespace(cluster.prefill.store)
    assert after[exact_name] == before[exact_name]
    assert after - before == Counter({own_name: 6})
    # Nor does the index list anything under an exact key.
    index = IndexReader(valkey.url)
    async with asyncio.timeout(60):
        while (await index.hit_blocks(own_name, request.digests)).blocks < 6:
            await asyncio.sleep(0.02)
    assert (await index.hit_blocks(exact_name, digests)).blocks == 0
    await index.close()


async def test_bound_early_every_stored_byte_is_the_references(
    cluster, prompt, reference, stored_blocks
) -> None:
    """Decode loads while prefill still seals; then it replays from the same place."""
    ids = prompt(760, "bound early")
    _, made, _ = reference.run(ids, {}, 32, Half.ENCODER)
    expected, blocks, kind = reference.run(ids, made, 32, max_tokens=12)
    assert kind is StartKind.BOUNDED
    request = cluster.request(ids, 12)
    call = await cluster.handoff(request, bind="early")
    assert list(await call.result()) == expected
    assert call.times.encoder_rows == 760 - (640 - 32)
    await cluster.at_rest()
    await cluster.written()
    stored = await stored_blocks(cluster.prefill.store, [*ids, *expected], request.chain_root)
    assert len(stored) == 6
    assert stored == [blocks[i] for i in range(6)]


@pytest.mark.parametrize("depth", DEPTHS)
async def test_every_depth_equals_its_reference_and_the_exact_one_an_exact_run(
    cluster, yardstick, prompt, reference, new_decode, depth: str
) -> None:
    ids, rows = prompt(500, f"depth {depth}"), DEPTHS[depth]
    await (await cluster.handoff(cluster.request(ids, 1))).result()
    await cluster.at_rest()
    decode = await new_decode(f"decode-{rows}", replay_depth_tokens=rows)
    to_decode = await cluster.router.connect(decode.shell.address)
    call = await cluster.router.send(cluster.request(ids, 8), to_decode)
    _, made, _ = reference.run(ids, {}, rows, Half.ENCODER)
    expected, _, kind = reference.run(ids, made, rows, max_tokens=8)
    assert list(await call.result()) == expected
    assert call.times.start_kind == kind
    assert call.times.encoder_rows == 500 - (384 - rows)
    if depth == "exact":
        assert kind is StartKind.REPLAY
        assert tuple(expected) == await yardstick.text(ids, 8)
    await cluster.at_rest()


async def test_exact_bytes_are_read_first_and_keep_their_class(
    cluster, yardstick, prompt, new_decode
) -> None:
    ids = prompt(500, "exact before")
    decode = await new_decode("decode-exact", handoff_mode=HandoffMode.EXACT)
    to_decode = await cluster.router.connect(decode.shell.address)
    tainted = cluster.request(ids, 8)
    plain = dataclasses.replace(
        tainted,
        request_id=RequestId("exact"),
        chain_root=tainted.exact_root,
        digests=tainted.exact_digests(tainted.token_ids),
        mode=HandoffMode.EXACT,
        exact_root=None,
    )
    text = await (await cluster.router.send(plain, to_decode)).result()
    assert text == await yardstick.text(ids, 8)
    assert await decode.work.committer.flush(5.0)
    before = cluster.prefill.driver.stats.encoder_rows_total
    call = await cluster.handoff(tainted, decode=1)
    await call.result()
    assert call.prefilled.hit_tokens == 384
    assert cluster.prefill.driver.stats.encoder_rows_total == before
    assert call.times.hit_tokens == 384 and call.times.load_bytes == 3 * cluster.card.block_bytes
    await cluster.at_rest()
    # What is exact was not copied into the other namespace.
    assert await cluster.prefill.store.open_prefix(tainted.digests, None) == ()


@pytest.mark.parametrize("made_by", ["prefill", "decode"])
async def test_what_stands_behind_an_exact_head_is_no_orphan(
    cluster, prompt, new_decode, store_settings, tag, tmp_path, made_by: str
) -> None:
    """Its head lies in the other class, so `headrace store gc` must not look for it in its own."""
    head = prompt(384, f"exact head for {made_by}")
    deployment = {"handoff_mode": HandoffMode.EXACT}
    decode = await new_decode(f"decode-before-{made_by}", **deployment)
    to_decode = await cluster.router.connect(decode.shell.address)
    tail = prompt(300 if made_by == "prefill" else 120, "behind it")
    tainted = cluster.request([*head, *tail], 12)
    plain = cluster.request(head, 1)
    plain = dataclasses.replace(
        plain,
        request_id=RequestId(f"exact head for {made_by}"),
        chain_root=plain.exact_root,
        digests=plain.exact_digests(plain.token_ids),
        mode=HandoffMode.EXACT,
        exact_root=None,
    )
    await (await cluster.router.send(plain, to_decode)).result()
    assert await decode.work.committer.flush(5.0)
    answer = await (await cluster.handoff(tainted)).result()
    await cluster.at_rest()
    await cluster.written()
    known = as_token_ids([*head, *tail, *answer][:-1])  # no row ran for the last token
    chain = block_digests(tainted.chain_root, known)
    store = cluster.prefill.store
    # The three of the head are not in this class, all that follow are.
    places = await store.open_objects(Kind.KV, chain, None)
    made = len(chain) - 3
    assert [place is not None for place in places] == [False] * 3 + [True] * made and made
    async with asyncio.timeout(60):
        while (stat := await store.stat()) is None or stat.pending:
            await asyncio.sleep(0.02)
    shutil.copytree(store_settings(tag).directory, tmp_path / "copy")
    with StoreDirectory(tmp_path / "copy") as files:
        stored = {bytes(header.facts.digest) for _, header in files.objects().values()}
        assert set(chain[3:]) <= stored
        found = find_garbage(files, Wishes(), lambda done, total: None)
    assert found.counts() == {} and found.objects == len(stored)
