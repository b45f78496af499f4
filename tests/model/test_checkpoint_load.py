"""A model loaded from a checkpoint against one built from values that an independent reader gave.

The independent side reads files with the safetensors library and decodes codes by their definition
in float64 numpy.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors import safe_open

from headrace.model import (
    BatchError,
    ConfigError,
    ModelConfig,
    Numerics,
    Placement,
    Trunk,
    Weights,
    build_token_map,
    package_tokenizer,
)
from headrace.model.checkpoint import (
    Checkpoint,
    CheckpointError,
    Part,
    Progress,
    Quantisation,
    ReleaseConfig,
    Selection,
    load_trunk,
    load_vision,
    released_quantisation,
    tensor_table,
    weights_id,
    write_random,
)
from headrace.model.checkpoint.names import select
from headrace.model.vision import VisionTower

LEVELS = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


def decode_e4m3(codes: NDArray[np.uint8]) -> NDArray[np.float64]:
    sign = np.where(codes & 128, -1.0, 1.0)
    exponent, mantissa = (codes >> 3 & 15).astype(int), (codes & 7).astype(float)
    normal = (1 + mantissa / 8) * np.exp2(exponent - 7.0)
    value = sign * np.where(exponent == 0, mantissa / 8 * 2.0**-6, normal)
    return np.where(codes & 127 == 127, np.nan, value)


def independent_values(folder: Path) -> dict[str, torch.Tensor]:
    """Weight name -> float32 values of every weight in a folder's shards."""
    raw: dict[str, tuple[str, NDArray[np.uint8], tuple[int, ...]]] = {}
    for path in folder.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118 - not a mapping
                tensor = file.get_tensor(name)
                dtype = file.get_slice(name).get_dtype()
                codes = tensor.contiguous().view(-1).view(torch.uint8).numpy()
                raw[name.removeprefix("model.")] = (dtype, codes, tuple(tensor.shape))
    values = {}
    for name, (dtype, codes, shape) in raw.items():
        if dtype == "F8_E8M0":
            continue
        if dtype == "BF16":
            bits = codes.view("<u2").astype(np.uint32) << 16
            wide = bits.view(np.float32).reshape(shape)
        elif dtype == "F32":
            wide = codes.view("<f4").reshape(shape)
        else:
            _, scale_codes, scale_shape = raw[name.removesuffix(".weight") + ".scale"]
            scale = np.exp2(scale_codes.reshape(scale_shape) - 127.0)
            if dtype == "I8":
                pairs = codes.reshape(shape)
                nibbles = np.stack([pairs & 15, pairs >> 4], -1).reshape(shape[0], -1)
                wide = np.array(LEVELS + [-x for x in LEVELS])[nibbles]
            else:
                wide = decode_e4m3(codes).reshape(shape)
            rows = -(-wide.shape[0] // scale.shape[0])
            rows, columns = (1, 32) if rows == 1 else (32, 32)
            spread = scale.repeat(rows, 0).repeat(columns, 1)
            wide = wide * spread[: wide.shape[0], : wide.shape[1]]
        values[name] = torch.from_numpy(wide.astype(np.float32))
    return values


@pytest.fixture(scope="module")
def make_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A model's random checkpoint in many shards, with the tokenizer of its vocabulary."""

    @cache
    def make(name: str) -> Path:
        release = ReleaseConfig(ModelConfig.load(name), Quantisation())
        path = tmp_path_factory.mktemp("checkpoint") / name
        tokenizer = package_tokenizer(release.model.vocab_size).to_str().encode()
        companions = {"tokenizer.json": tokenizer}
        write_random(path, release, 5, max_shard_bytes=200_000, companions=companions)
        return path

    return make


@pytest.fixture(scope="module")
def folder(make_folder: Callable[[str], Path]) -> Path:
    return make_folder("toy")


@pytest.fixture(scope="module")
def config() -> ModelConfig:
    return ModelConfig.load("toy")


@pytest.fixture(scope="module")
def token_map(config: ModelConfig) -> NDArray[np.int64]:
    return build_token_map(package_tokenizer(config.vocab_size)).ids


@pytest.fixture
def logits(
    driver_type: Any, part_type: Any, make_text: Callable[..., Any]
) -> Callable[[Trunk], torch.Tensor]:
    """All logits of a 70-token text in two calls; T1's windows and candidates are all passed."""

    def run(trunk: Trunk) -> torch.Tensor:
        text = make_text(70, 3, trunk.config)
        driver = driver_type(trunk)
        first = driver.call(part_type(text, 0, 41, 0, (0,), logits_from=0))
        second = driver.call(part_type(text, 41, 70, 0, (0,), logits_from=41))
        return torch.cat((first.logits, second.logits))

    return run


@pytest.mark.parametrize(
    ("name", "numerics"),
    [("toy", Numerics.FAST), ("toy", Numerics.INVARIANT), ("t1", Numerics.FAST)],
)
def test_logits_equal_those_of_the_decoded_weights(
    make_folder: Callable[[str], Path],
    name: str,
    numerics: Numerics,
    logits: Callable[[Trunk], torch.Tensor],
) -> None:
    folder, config = make_folder(name), ModelConfig.load(name)
    token_map = build_token_map(package_tokenizer(config.vocab_size)).ids
    values = independent_values(folder)
    wanted = logits(Trunk(config, values, numerics, token_map=token_map, weights_id=""))
    assert torch.equal(logits(load_trunk(folder, numerics)), wanted)
    if name == "toy":
        assert torch.equal(logits(load_trunk(folder, numerics, widen_to=torch.float32)), wanted)
        unquantised = Trunk.random(config, 5, numerics, token_map=token_map)
        assert not torch.equal(logits(unquantised), wanted)  # formats do round


def test_every_weight_equals_the_independent_reading(folder: Path) -> None:
    values = independent_values(folder)
    with Checkpoint.open(folder) as checkpoint:
        read = dict(checkpoint.stream())
        narrow = dict(checkpoint.stream(torch.bfloat16))
        stored = {e.name: checkpoint.read_stored(e).widen() for e in checkpoint.entries}
    assert read.keys() == narrow.keys() == stored.keys() == values.keys()
    for name, wanted in values.items():
        assert torch.equal(read[name], wanted), name
        assert torch.equal(narrow[name].to(torch.float32), wanted), name
        assert torch.equal(stored[name], wanted), name


def test_encoder_only_build_writes_the_same_state_from_fewer_bytes(
    folder: Path,
    config: ModelConfig,
    tmp_path: Path,
    driver_type: Any,
    part_type: Any,
    make_text: Callable[..., Any],
) -> None:
    """Only the shards of the encoder's parts are on the host: blocks and windows are equal."""
    with Checkpoint.open(folder, Selection.ENCODER) as checkpoint:
        needed = {shard.name for shard in checkpoint.shards}
        encoder_bytes = checkpoint.total_bytes
    host = tmp_path / "host"
    shutil.copytree(folder, host)
    removed = [path for path in host.glob("*.safetensors") if path.name not in needed]
    assert removed
    for path in removed:
        path.unlink()
    with pytest.raises(CheckpointError, match="shard missing"):
        load_trunk(host, Numerics.INVARIANT)
    encoder = load_trunk(host, Numerics.INVARIANT, encoder_only=True)
    whole = load_trunk(folder, Numerics.INVARIANT)
    assert encoder.weights_id == whole.weights_id
    text = make_text(128, 4, config)
    states = []
    for trunk in (encoder, whole):
        driver = driver_type(trunk)
        result = driver.call(part_type(text, 0, 128, 0, (0,), decoder_from=128))
        assert (result.encoder_rows, result.decoder_rows) == (128, 0)
        states.append((driver.state.read_block(0), driver.state.read_window(0, 128)))
    assert states[0] == states[1]
    assert any(states[0][0])
    with pytest.raises(BatchError, match="encoder half only"):
        driver_type(encoder).call(part_type(text, 0, 5, 0, (0,)))
    with Checkpoint.open(host, Selection.ENCODER) as checkpoint:
        headers = checkpoint.meter.read_bytes
        for _ in checkpoint.stream():
            pass
        assert checkpoint.meter.read_bytes - headers == encoder_bytes


# Of the bytes of trunk and drafter in a file of the released formats, with and without Engram.
FILE_SHARES = {"t1": {True: 0.465, False: 0.424}, "flash": {True: 0.692, False: 0.487}}


def read_by(load: Callable[[], object]) -> int:
    """Bytes that this process asked the kernel for while `load` ran."""
    counts = Path("/proc/self/io")
    before = int(counts.read_text().split()[1])
    load()
    return int(counts.read_text().split()[1]) - before


def stored_bytes(name: str, selection: Selection, *, engram: bool) -> int:
    config = ModelConfig.load(name)
    table = tensor_table(config, released_quantisation(config))
    entries = select(config, table, selection)
    return sum(entry.n_bytes for entry in entries if engram or entry.part is not Part.ENGRAM)


@pytest.mark.parametrize("name", FILE_SHARES)
def test_the_encoder_halfs_share_of_the_file(name: str) -> None:
    for engram, wanted in FILE_SHARES[name].items():
        half, whole = (
            stored_bytes(name, s, engram=engram) for s in (Selection.ENCODER, Selection.TEXT)
        )
        assert round(half / whole, 3) == wanted


def test_loading_the_encoder_half_reads_its_bytes_and_no_others(
    make_folder: Callable[[str], Path],
) -> None:
    """By the kernel's count: the weights' bytes, and besides at most all shards' headers, and
    index, tokenizer and configuration twice."""
    folder = make_folder("t1")
    load_trunk(folder, Numerics.FAST)  # what is imported at the first use is read by now
    read = {
        half: read_by(lambda half=half: load_trunk(folder, Numerics.FAST, encoder_only=half))
        for half in (True, False)
    }
    with Checkpoint.open(folder, Selection.FULL) as checkpoint:
        every = checkpoint.total_bytes
    besides = sum(path.stat().st_size for path in folder.glob("*.safetensors")) - every
    besides += 2 * sum(path.stat().st_size for path in folder.glob("*.json"))
    assert besides < 0.1 * every  # small beside the half that is not read
    for half, selection in ((True, Selection.ENCODER), (False, Selection.TEXT)):
        with Checkpoint.open(folder, selection) as checkpoint:
            weights = checkpoint.total_bytes
        assert weights == stored_bytes("t1", selection, engram=True)
        assert 0 <= read[half] - weights <= besides


def test_vision_role_reads_its_part_alone(
    folder: Path, config: ModelConfig, tmp_path: Path
) -> None:
    with Checkpoint.open(folder, Selection.VISION) as checkpoint:
        needed = {shard.name for shard in checkpoint.shards}
    host = tmp_path / "host"
    host.mkdir()
    for name in (*needed, "config.json", "model.safetensors.index.json"):
        shutil.copy(folder / name, host)
    tower = load_vision(host, Numerics.FAST)
    values = independent_values(folder)
    wanted = VisionTower(config, values, Numerics.FAST, weights_id="")
    assert config.vision is not None
    side = config.vision.patch_size * 12
    pixels = np.random.default_rng(0).integers(0, 256, (side, side, 3), dtype=np.uint8)
    assert torch.equal(tower.encode(pixels), wanted.encode(pixels))
    assert not torch.equal(
        tower.encode(pixels), VisionTower.random(config, 6, Numerics.FAST).encode(pixels)
    )


def test_weights_id_names_weights_config_and_token_map(
    folder: Path, token_map: NDArray[np.int64], tmp_path: Path
) -> None:
    wanted = weights_id(folder, token_map)
    other = token_map.copy()
    other[:2] = other[1::-1]
    assert weights_id(folder, other) != wanted
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    config = copy / "config.json"
    text = config.read_text()
    config.write_text(text.replace('"swiglu_limit": 10.0', '"swiglu_limit": 9.0'))
    assert config.read_text() != text
    assert weights_id(copy, token_map) != wanted
    config.write_text(text)
    index = copy / "model.safetensors.index.json"
    recorded = index.read_text()
    index.write_text(recorded.replace("tensors_sha256", "other_key"))
    assert index.read_text() != recorded
    assert weights_id(copy, token_map) == wanted  # without a record every byte is read


def test_missing_tokenizer_and_missing_decoder_half_are_refused(
    folder: Path, config: ModelConfig, tmp_path: Path
) -> None:
    host = tmp_path / "host"
    shutil.copytree(folder, host)
    (host / "tokenizer.json").unlink()
    with pytest.raises(CheckpointError, match="tokenizer.json: missing"):
        load_trunk(host, Numerics.FAST)
    ratios = tuple(2 if r == 1 else r for r in config.compress_ratios)
    flat = replace(config, compress_ratios=ratios)
    assert flat.n_decoder_layers == 0
    plain = ReleaseConfig(flat, None)
    write_random(tmp_path / "flat", plain, 0, selection=Selection.TEXT)
    with pytest.raises(ConfigError, match="encoder-only build is the whole model"):
        Checkpoint.open(tmp_path / "flat", Selection.ENCODER)


@pytest.mark.parametrize("name", ["toy", "v4-toy"])
@pytest.mark.parametrize("weights", Weights)
@pytest.mark.parametrize("engram", [Placement.MEMORY, Placement.MAPPED])
def test_progress_ends_at_its_total(
    make_folder: Callable[[str], Path], name: str, weights: Weights, engram: Placement
) -> None:
    """No weight is left over: a drafter's unused bias and mapped tables do not count."""
    for encoder_only in (False, True) if name == "toy" else (False,):
        seen: list[Progress] = []
        load_trunk(
            make_folder(name),
            Numerics.FAST,
            encoder_only=encoder_only,
            engram=engram,
            weights=weights,
            on_progress=seen.append,
        )
        done = [progress.done_bytes for progress in seen]
        assert done == sorted(set(done)) and len({p.total_bytes for p in seen}) == 1
        assert done[-1] == seen[-1].total_bytes > 0
