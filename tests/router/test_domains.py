"""Chains and domains: who may hit what, and how a real index steers the route."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from headrace.core.chain import block_digests, domain_salt, root_digest, window_digest
from headrace.kvstore import IndexReader, Kind, StoreClient, StoreSettings, run_store

OTHER_KEY = "key-of-tenant-b-0123"
PROMPT = [300 + i % 3000 for i in range(1000)]
BODY = {"model": "scripted", "prompt": PROMPT, "max_tokens": 64}


async def test_digests_are_those_of_the_tenants_domain(rigs: Any) -> None:
    """G1 at its root: equal prompts of two tenants share no digest, of one tenant all."""
    async with rigs() as rig:
        for client in (rig.client, rig.client, rig.new_client(key=OTHER_KEY)):
            assert (await client.post("/v1/completions", json=BODY)).status_code == 200
        first, second, other = (job.request for job in rig.decodes[0].jobs)
        master = Path(rig.settings.salt_directory, "salt").read_bytes()
        namespace = rig.decodes[0].card.namespace().digest()
        for request, domain in ((first, "a"), (other, "b")):
            root = root_digest(namespace, domain_salt(master, domain))
            assert request.domain == domain and request.chain_root == root
            assert request.digests == block_digests(root, request.token_ids)
        assert first.digests == second.digests and len(first.digests) == 7
        assert not set(first.digests) & set(other.digests)
        assert first.request_id != second.request_id


async def test_two_keys_of_one_domain_share(rigs: Any) -> None:
    from headrace.router.keys import ApiKey, KeyRing

    ring = KeyRing([ApiKey("0123456789", "x", "shared"), ApiKey("9876543210", "y", "shared")], 512)
    one, two = (ring.principal(b"Bearer " + key) for key in (b"0123456789", b"9876543210"))
    assert (one.tenant, two.tenant) == ("x", "y") and one.domain == two.domain == "shared"


@pytest.mark.redis
async def test_stored_blocks_make_the_route_local(rigs: Any, tmp_path: Path) -> None:
    """A real store behind a real index: the same prompt goes through prefill while it is unknown,
    straight to decode once its blocks and a window record are listed, and for another tenant
    through prefill again. A look-up that is late counts as a miss, hence the patience."""
    async with rigs(prefills=1, local_prefill_rows=200, lookup_s=10.0) as rig:
        assert (await rig.client.post("/v1/completions", json=BODY)).status_code == 200
        assert len(rig.prefills[0].jobs) == 1
        request = rig.decodes[0].jobs[0].request
        role = replace(rig.role("store"), listen=f"unix://{tmp_path}/s.sock")
        settings = StoreSettings(
            directory=rig.settings.salt_directory,
            arena_bytes=1 << 20,
            ssd_bytes=1 << 20,
            segment_bytes=1 << 18,
            block_bytes=1024,
            window_bytes=256,
        )
        stop, up = asyncio.Event(), asyncio.Event()
        store = asyncio.create_task(
            run_store(role, settings, ready=lambda member: up.set(), stop=stop)
        )
        try:
            await asyncio.wait_for(up.wait(), 10)
            namespace = rig.decodes[0].card.namespace().digest()
            client = StoreClient(role.listen, role.token, namespace)
            await client.connect(5.0)
            blocks = [(digest, bytes(1024)) for digest in request.digests]
            assert None not in await client.put(Kind.KV, blocks)
            window = window_digest(request.digests[6])
            put = await client.put(
                Kind.SWA, [(window, bytes(256))], parent=request.digests[6], first_block=7
            )
            assert None not in put
            reader = IndexReader(rig.redis_url, deadline_s=10.0)
            async with asyncio.timeout(60):
                while not (hits := await reader.hit_blocks(namespace, request.digests)).windows:
                    await asyncio.sleep(0.02)
            assert (hits.blocks, hits.windows) == (7, (896,))
            await reader.close()
            assert (await rig.client.post("/v1/completions", json=BODY)).status_code == 200
            assert len(rig.prefills[0].jobs) == 1  # not asked again
            assert not rig.decodes[0].jobs[1].await_prefill
            # keep is 20: R = min(896, 980), the record at 896 is used, 104 rows run.
            assert "104 rows, hit 896 of 1000; local" in rig.records()[-1]["why"]
            other = rig.new_client(key=OTHER_KEY)
            assert (await other.post("/v1/completions", json=BODY)).status_code == 200
            assert len(rig.prefills[0].jobs) == 2
            assert "1000 rows, hit 0 of 1000" in rig.records()[-1]["why"]
            await other.aclose()
            await client.close()
        finally:
            stop.set()
            await asyncio.wait_for(store, 10)
