"""Roles that serve a folder of weights: each reads what it needs and no more, and the text is that
of one engine on the same folder, however a role holds the weights."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from headrace.core.deployment import Deployment
from headrace.core.errors import ConfigError
from headrace.engine import EngineSettings, Half, load_engine
from headrace.model import ModelConfig, package_tokenizer
from headrace.model.checkpoint import (
    Checkpoint,
    CheckpointError,
    Quantisation,
    ReleaseConfig,
    Selection,
    write_random,
)
from headrace.model.engram_store import HostTable
from headrace.vision.role import load_encoder
from headrace.vision.settings import VisionSettings

MODEL = "served-under-this-name"
WITH_CHECKPOINT = True
SIZES = EngineSettings(n_blocks=8, n_slots=1)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    release = ReleaseConfig(ModelConfig.load("t1"), Quantisation())
    folder = tmp_path_factory.mktemp("weights") / "t1"
    tokenizer = package_tokenizer(release.model.vocab_size).to_str().encode()
    write_random(
        folder, release, 3, max_shard_bytes=400_000, companions={"tokenizer.json": tokenizer}
    )
    return folder


@pytest.mark.asyncio(loop_scope="module")
async def test_a_handoff_equals_one_engine(
    cluster: Any, yardstick: Any, prompt: Any, new_decode: Any
) -> None:
    """Also on a decode replica that keeps its weights packed and its Engram tables in the file."""
    ids = prompt(300, "checkpoint")
    wanted = await yardstick.text(ids, 6)
    assert await (await cluster.handoff(cluster.request(ids, 6))).result() == wanted
    await cluster.at_rest()
    assert cluster.card.name == MODEL
    packed = await new_decode("decode-2", weights="packed", engram="mapped")
    tables = packed.engine.model.engram
    assert tables and all(isinstance(table, HostTable) for table in tables)
    assert packed.engine.card(MODEL) == cluster.card
    to_packed = await cluster.router.connect(packed.shell.address)
    call = await cluster.router.send(cluster.request(ids, 6), to_packed)
    assert await call.result() == wanted
    assert call.times is not None and call.times.hit_tokens == 256
    seeded = Deployment(model="t1", seed=3)
    other = await asyncio.to_thread(load_engine, seeded, SIZES, Half.ENCODER)
    assert other.card(MODEL).weights != cluster.card.weights


def deployment(folder: Path, **more: Any) -> Deployment:
    return Deployment(model=MODEL, checkpoint=str(folder), **more)


def shards_of(folder: Path, selection: Selection) -> set[str]:
    with Checkpoint.open(folder, selection) as opened:
        return {shard.name for shard in opened.shards}


@pytest.mark.parametrize(
    ("selection", "load"),
    [
        (Selection.ENCODER, lambda d: load_engine(d, SIZES, Half.ENCODER)),
        (Selection.VISION, lambda d: load_encoder(d, VisionSettings())),
    ],
)
def test_a_host_has_the_files_of_its_roles_alone(
    checkpoint: Path, tmp_path: Path, selection: Selection, load: Callable[[Deployment], object]
) -> None:
    """Other shards are absent; the card, and with it the store's namespace, is the same."""
    needed = shards_of(checkpoint, selection)
    for path in checkpoint.iterdir():
        if path.suffix != ".safetensors" or path.name in needed:
            (tmp_path / path.name).symlink_to(path)
    assert len(needed) < len(shards_of(checkpoint, Selection.FULL))
    made: Any = load(deployment(tmp_path))
    card = made[1] if isinstance(made, tuple) else made.card(MODEL)
    assert card == load_engine(deployment(checkpoint), SIZES, Half.FULL).card(MODEL)
    with pytest.raises(CheckpointError, match="shard missing from the checkpoint"):
        load_engine(deployment(tmp_path), SIZES, Half.FULL)


def test_progress_is_logged_in_bytes(checkpoint: Path, caplog: pytest.LogCaptureFixture) -> None:
    with Checkpoint.open(checkpoint, Selection.ENCODER) as opened:
        total = opened.total_bytes
    caplog.set_level(logging.INFO, "headrace.model.checkpoint.progress")
    load_engine(deployment(checkpoint), SIZES, Half.ENCODER)
    (line,) = [r.getMessage() for r in caplog.records if "bytes read" in r.getMessage()]
    assert line.startswith(f"weights of {MODEL}: {total} of {total} bytes read in ")


def test_what_is_wrong_with_a_folder_is_said(checkpoint: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="config.json: missing"):
        load_engine(deployment(tmp_path), SIZES, Half.FULL)
    (tmp_path / "config.json").write_text(json.dumps({"text_config": {}}))
    with pytest.raises(ConfigError, match="rope_scaling.factor: found nothing, wanted a value"):
        load_engine(deployment(tmp_path), SIZES, Half.FULL)
