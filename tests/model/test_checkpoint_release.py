"""A checkpoint with the names, dtypes, shards and index of the release at toy dimensions: what is
read is what is written, every byte and dtype of it. The files are made here, not by the writer.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from headrace.model import ModelConfig
from headrace.model.checkpoint import (
    Checkpoint,
    Part,
    Quantisation,
    ReleaseConfig,
    Selection,
    StoredSpec,
    convert,
    copy,
    tensor_table,
    write_values,
)
from headrace.model.checkpoint.release import config_document
from headrace.model.engram_hash import sum_of_primes

INDEX = "model.safetensors.index.json"
N_SHARDS = 48  # as many as were published
FLASH = ModelConfig.load("flash")
Stored = dict[str, tuple[str, tuple[int, ...], bytes]]


def shrunk(n_experts: int, n_drafter_experts: int) -> ReleaseConfig:
    """Flash with all its layers, stages, blocks and mechanisms, and narrow matrices."""
    assert FLASH.vision is not None
    vision = replace(FLASH.vision, hidden_size=64, num_attention_heads=4, intermediate_size=64)
    rows = sum_of_primes(2, FLASH.engram_max_ngram_size, FLASH.engram_n_heads, 11)
    config = replace(
        FLASH,
        hidden_size=32,
        num_attention_heads=8,
        head_dim=32,
        qk_rope_head_dim=16,
        q_lora_rank=32,
        o_lora_rank=32,
        moe_intermediate_size=32,
        index_n_heads=2,
        index_head_dim=32,
        vocab_size=512,
        n_routed_experts=n_experts,
        dspark_n_routed_experts=n_drafter_experts,
        engram_vocab_size=11,
        engram_num_embeddings=rows,
        engram_head_dim=32,
        engram_compressed_vocab_size=300,
        dspark_noise_token_id=500,
        image_token_id=501,
        dspark_markov_rank=8,
        vision=vision,
    )
    return ReleaseConfig(config, Quantisation())


def content(spec: StoredSpec, draw: np.random.Generator) -> bytes:
    """Any codes that are finite values, with scales that no writer of ours would choose."""
    size = int(np.prod(spec.shape))
    if spec.dtype in ("BF16", "F32"):
        values = draw.standard_normal(size).astype("<f4").view("<u4")
        return values.tobytes() if spec.dtype == "F32" else (values >> 16).astype("<u2").tobytes()
    codes = draw.integers(0, 256, size, dtype=np.uint8)
    if spec.dtype == "F8_E8M0":
        codes = 100 + codes % 40
    if spec.dtype == "F8_E4M3":
        codes[codes & 0x7F == 0x7F] = 0x80  # NaN becomes minus zero, a code of its own
    return codes.tobytes()


def make(folder: Path, release: ReleaseConfig) -> Stored:
    """Write the folder tensor by tensor, weights and scales of a layer spread over the shards."""
    draw = np.random.default_rng(5)
    table = tensor_table(release.model, release.quantisation)
    specs = sorted((spec for entry in table for spec in entry.stored), key=lambda spec: spec.name)
    tensors = {spec.name: (spec.dtype, spec.shape, content(spec, draw)) for spec in specs}
    weight_map: dict[str, str] = {}
    folder.mkdir()
    for number in range(N_SHARDS):
        file = f"model-{number + 1:05d}-of-{N_SHARDS:05d}.safetensors"
        names = [spec.name for spec in specs[number::N_SHARDS]]
        header: dict[str, object] = {"__metadata__": {"format": "pt"}}
        at = 0
        for name in names:
            dtype, shape, data = tensors[name]
            end = at + len(data)
            header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, end]}
            weight_map[name], at = file, end
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        body = b"".join(tensors[name][2] for name in names)
        (folder / file).write_bytes(len(text).to_bytes(8, "little") + text + body)
    total = sum(len(data) for _, _, data in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    (folder / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")
    (folder / "config.json").write_text(json.dumps(config_document(release), indent=2) + "\n")
    return tensors


def stored_in(folder: Path, prefix: str = "") -> Stored:
    """Name -> dtype, shape, bytes, by the definition of the format and the folder's index."""
    weight_map = json.loads((folder / INDEX).read_text())["weight_map"]
    found: Stored = {}
    for file in sorted(set(weight_map.values())):
        raw = (folder / file).read_bytes()
        length = int.from_bytes(raw[:8], "little")
        header = json.loads(raw[8 : 8 + length])
        header.pop("__metadata__", None)
        for name, entry in header.items():
            assert weight_map[name] == file
            begin, end = (8 + length + offset for offset in entry["data_offsets"])
            key = name.removeprefix(prefix)
            found[key] = (entry["dtype"], tuple(entry["shape"]), raw[begin:end])
    assert len(found) == len(weight_map)
    return found


def names_and_dtypes(release: ReleaseConfig) -> list[tuple[str, str]]:
    table = tensor_table(release.model, release.quantisation)
    return [(spec.name, spec.dtype) for entry in table for spec in entry.stored]


def check_round_trip(release: ReleaseConfig, place: Path) -> Stored:
    tensors = make(place / "made", release)
    assert stored_in(place / "made") == tensors
    document = json.loads((place / "made" / "config.json").read_text())
    with Checkpoint.open(place / "made") as checkpoint:
        assert checkpoint.release == release
        copy(checkpoint, place / "copied", document)
        convert(checkpoint, place / "ours", max_shard_bytes=1 << 21, prefix="model.")
        values = dict(checkpoint.stream())
    for path in (place / "made").glob("*.safetensors"):
        assert (place / "copied" / path.name).stat().st_size > 0
    assert stored_in(place / "copied") == tensors
    ours = json.loads((place / "ours" / INDEX).read_text())["weight_map"]
    assert all(name.startswith("model.") for name in ours) and len(set(ours.values())) > 1
    assert stored_in(place / "ours", "model.") == tensors
    with Checkpoint.open(place / "ours") as checkpoint:
        again = dict(checkpoint.stream())
    assert again.keys() == values.keys()
    assert all(again[name].equal(values[name]) for name in values)
    # Through the values: the writer's canonical codes, which then stay what they are.
    for target, source in (("encoded", values), ("twice", None)):
        if source is None:
            with Checkpoint.open(place / "encoded") as checkpoint:
                source = dict(checkpoint.stream())
        write_values(place / target, release, source, selection=Selection.FULL)
    assert stored_in(place / "encoded") == stored_in(place / "twice")
    dtypes = {name: dtype for name, (dtype, _, _) in tensors.items()}
    assert {name: dtype for name, (dtype, _, _) in stored_in(place / "twice").items()} == dtypes
    return tensors


def test_the_release_s_names_and_dtypes_round_trip_byte_for_byte(tmp_path: Path) -> None:
    """All layers, stages, tables and the tower; of the experts the first eight and four."""
    release = shrunk(8, 4)
    tensors = check_round_trip(release, tmp_path)
    published = dict(names_and_dtypes(ReleaseConfig(FLASH, Quantisation())))
    dtypes = {name: dtype for name, (dtype, _, _) in tensors.items()}
    assert dtypes.items() <= published.items()
    assert {name for name in published.keys() - dtypes.keys() if ".experts." not in name} == set()
    parts = {entry.part for entry in tensor_table(release.model, release.quantisation)}
    assert parts == set(Part)
    assert {"BF16", "F32", "F8_E4M3", "F8_E8M0", "I8"} == set(dtypes.values())
    for name in ("mtp.2.markov_head.head.weight", "layers.14.engram.embed.scale"):
        assert name in tensors


@pytest.mark.slow
def test_all_of_the_release_s_tensors_round_trip_byte_for_byte(tmp_path: Path) -> None:
    """With 384 and 128 experts the names are the release's 96,085."""
    release = shrunk(FLASH.n_routed_experts, FLASH.dspark_n_routed_experts)
    published = names_and_dtypes(ReleaseConfig(FLASH, Quantisation()))
    assert names_and_dtypes(release) == published and len(published) == 96_085
    assert len(check_round_trip(release, tmp_path)) == 96_085
