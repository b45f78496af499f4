"""V4's checkpoints: names and formats of the published files, round trips, damage, its config."""

from __future__ import annotations

import copy as copying
import json
import shutil
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from headrace.model import ConfigError, ModelConfig, Numerics, Trunk
from headrace.model.checkpoint import (
    Checkpoint,
    CheckpointError,
    Quantisation,
    ReleaseConfig,
    Selection,
    config_document,
    convert,
    copy,
    load_trunk,
    read_config,
    released_quantisation,
    tensor_table,
    write_random,
)
from headrace.model.checkpoint.names import select
from headrace.model.packed import Weights
from headrace.model.weights import tensor_specs

INDEX = "model.safetensors.index.json"
SHARD_BYTES = 200_000
TOY = ReleaseConfig(ModelConfig.load("v4-toy"), Quantisation((128, 128)))


def published(name: str) -> dict[str, Any]:
    path = resources.files("headrace.configs") / "models" / f"{name}.json"
    document: dict[str, Any] = json.loads(path.read_text())
    return document


# ---- names ---------------------------------------------------------------------------------


def test_flash_has_the_published_number_of_tensors() -> None:
    """69,187 in the index, 1,575 of them under mtp."""
    table = tensor_table(ModelConfig.load("v4-flash"), Quantisation((128, 128)))
    assert sum(len(entry.stored) for entry in table) == 69_187 - 1_575
    assert len({entry.name for entry in table}) == len(table)
    counts = dict.fromkeys(("hyper", "router", "compressor", "indexer"), 0)
    for entry in table:
        for spec in entry.stored:
            counts["hyper"] += ".hc_" in spec.name or spec.name.startswith("hc_")
            counts["router"] += ".ffn.gate." in spec.name
            counts["compressor"] += ".compressor." in spec.name
            counts["indexer"] += ".indexer." in spec.name and ".compressor." not in spec.name
    assert counts == {"hyper": 261, "router": 86, "compressor": 248, "indexer": 63}


# Headers of the published files: stored name -> dtype, stored shape.
PUBLISHED = {
    "embed.weight": ("BF16", (129280, 4096)),
    "head.weight": ("BF16", (129280, 4096)),
    "hc_head_fn": ("F32", (4, 16384)),
    "layers.0.hc_attn_fn": ("F32", (24, 16384)),
    "layers.0.attn.wq_a.weight": ("F8_E4M3", (1024, 4096)),
    "layers.0.attn.wq_a.scale": ("F8_E8M0", (8, 32)),
    "layers.0.ffn.gate.tid2eid": ("I64", (129280, 6)),
    "layers.3.ffn.gate.bias": ("F32", (256,)),
    "layers.2.attn.compressor.ape": ("F32", (4, 1024)),
    "layers.3.attn.compressor.ape": ("F32", (128, 512)),
    "layers.2.attn.indexer.wq_b.weight": ("F8_E4M3", (8192, 1024)),
    "layers.2.attn.indexer.compressor.ape": ("F32", (4, 256)),
    "layers.2.attn.indexer.compressor.wkv.weight": ("BF16", (256, 4096)),
    "layers.0.ffn.experts.0.w1.weight": ("I8", (2048, 2048)),
    "layers.0.ffn.experts.0.w1.scale": ("F8_E8M0", (2048, 128)),
    "layers.0.ffn.shared_experts.w1.weight": ("F8_E4M3", (2048, 4096)),
    "layers.0.ffn.shared_experts.w1.scale": ("F8_E8M0", (16, 32)),
}


def test_flash_has_the_published_names_formats_and_shapes() -> None:
    table = tensor_table(ModelConfig.load("v4-flash"), Quantisation((128, 128)))
    stored = {s.name: (s.dtype, s.shape) for entry in table for s in entry.stored}
    assert {name: stored.get(name) for name in PUBLISHED} == PUBLISHED
    absent = ("layers.3.ffn.gate.tid2eid", "layers.0.ffn.gate.bias", "layers.0.ffn.gate.bias_vl")
    assert not {*absent, "layers.3.attn.indexer.wq_b.weight"} & stored.keys()


def test_the_random_trunk_has_the_names_and_shapes_of_the_table() -> None:
    table = {entry.name: entry.shape for entry in tensor_table(TOY.model, None)}
    assert {spec.name: spec.shape for spec in tensor_specs(TOY.model)} == table


def test_an_encoder_alone_is_refused_and_text_is_all() -> None:
    table = tensor_table(TOY.model, TOY.quantisation)
    assert select(TOY.model, table, Selection.TEXT) == table
    with pytest.raises(ConfigError, match="an encoder-only build is the whole model"):
        select(TOY.model, table, Selection.ENCODER)


# ---- configuration -------------------------------------------------------------------------


def test_the_published_file_gives_the_package_s_flash() -> None:
    release = read_config(published("v4-flash"))
    assert release.model == ModelConfig.load("v4-flash")
    assert release.quantisation == Quantisation((128, 128), "fp4")
    assert released_quantisation(release.model) == release.quantisation
    c = release.model
    assert (c.num_hidden_layers, c.compress_ratios.count(4), c.compress_ratios.count(128)) == (
        43,
        21,
        20,
    )
    assert c.n_decoder_layers == 0 and c.num_nextn_predict_layers == 0


@pytest.mark.parametrize("quantisation", [None, Quantisation((128, 128)), Quantisation()])
def test_what_is_written_reads_back(quantisation: Quantisation | None) -> None:
    release = ReleaseConfig(TOY.model, quantisation)
    document = json.loads(json.dumps(config_document(release)))
    assert read_config(document) == release


def test_written_keys_are_the_published_ones() -> None:
    written = config_document(read_config(published("v4-flash")))
    unneeded = {"attention_dropout", "num_nextn_predict_layers"}
    assert written.keys() - {"pad_token_id"} == published("v4-flash").keys() - unneeded


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("gamma", 1, "gamma: unknown key"),
        ("family", "deepseek_v4", "family: unknown key"),
        ("engram_layer_ids", [], "engram_layer_ids: unknown key in a deepseek_v4 configuration"),
        ("kv_source_layer_ids", [1], "kv_source_layer_ids: unknown key in a deepseek_v4"),
        ("compress_ratios", [0, 4, 128, 4, 2, 4, 0], r"compress_ratios\[4\]: found 2, wanted 0, 4"),
        ("compress_ratios", [0, 4], "compress_ratios: found 2, wanted 6 entries"),
        ("compress_ratios", 4, "compress_ratios: found 4, wanted list"),
        ("num_hidden_layers", "6", "num_hidden_layers: found '6', wanted int"),
        ("hidden_size", "64", "hidden_size: found '64', wanted int"),
        ("num_hash_layers", 7, r"num_hash_layers: found 7, wanted in 0\.\.6"),
        ("sliding_window", 4, "sliding_window: found 4, wanted at least 5"),
        ("head_dim", 128, r"qk_rope_head_dim \+ a multiple of 64, not \+ 96"),
        ("index_head_dim", 96, "index_head_dim: found 96, wanted a power of 2"),
        ("mlp_bias", True, "mlp_bias: found True, wanted False"),
        ("expert_dtype", "int4", "expert_dtype: found 'int4', wanted 'fp4' or 'fp8'"),
    ],
)
def test_refused_with_key_found_and_wanted(key: str, value: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_config(published("v4-toy") | {key: value})


def test_a_v41_file_has_no_key_of_v4() -> None:
    document = copying.deepcopy(published("toy"))
    document["text_config"]["num_hash_layers"] = 1
    with pytest.raises(ConfigError, match="num_hash_layers: unknown key"):
        read_config(document)


# ---- files ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("v4") / "toy"
    write_random(folder, TOY, 3, max_shard_bytes=SHARD_BYTES)
    assert len(list(folder.glob("*.safetensors"))) > 3
    return folder


@pytest.fixture
def damaged(sound: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(sound, tmp_path / "damaged"))


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def values_of(folder: Path) -> dict[str, torch.Tensor]:
    with Checkpoint.open(folder) as checkpoint:
        return dict(checkpoint.stream())


def test_round_trip_byte_for_byte(sound: Path, tmp_path: Path) -> None:
    document = json.loads((sound / "config.json").read_text())
    with Checkpoint.open(sound) as checkpoint:
        copy(checkpoint, tmp_path / "copied", document)
        convert(checkpoint, tmp_path / "converted", max_shard_bytes=SHARD_BYTES)
        convert(checkpoint, tmp_path / "prefixed", prefix="model.")
    assert contents(tmp_path / "copied") == contents(sound) == contents(tmp_path / "converted")
    with Checkpoint.open(tmp_path / "prefixed") as prefixed:
        convert(prefixed, tmp_path / "back", max_shard_bytes=SHARD_BYTES)
    assert contents(tmp_path / "back") == contents(sound)
    table = values_of(sound)["layers.0.ffn.gate.tid2eid"]
    assert table.dtype == torch.int64 and table.shape == (1024, 2)
    assert (table[:, 0] != table[:, 1]).all() and set(table.unique().tolist()) == {0, 1, 2, 3}


@pytest.mark.parametrize("weights", Weights)
def test_a_loaded_trunk_runs_the_stored_values(
    sound: Path, driver_type, part_type, make_text, weights: Weights
) -> None:
    loaded = load_trunk(sound, Numerics.INVARIANT, weights=weights)
    direct = Trunk(
        TOY.model,
        values_of(sound),
        Numerics.INVARIANT,
        token_map=np.zeros(0, np.int64),
        weights_id="direct",
    )
    part = part_type(make_text(140, 1, TOY.model), 0, 140, slot=0, table=(0, 1))
    logits = driver_type(loaded).call(part).logits
    assert torch.equal(logits, driver_type(direct).call(part).logits)
    assert not logits.isnan().any() and logits.std() > 0.5


def test_the_prediction_layer_s_tensors_are_passed_over(damaged: Path, tmp_path: Path) -> None:
    save_file({"mtp.0.e_proj.weight": torch.ones(2, 2)}, damaged / "mtp.safetensors")
    mixed = next(iter(sorted(damaged.glob("model-*.safetensors"))))
    with safe_open(mixed, "pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    save_file({**tensors, "mtp.0.norm.weight": torch.ones(2)}, mixed)
    index = json.loads((damaged / INDEX).read_text())
    index["weight_map"]["mtp.0.e_proj.weight"] = "mtp.safetensors"
    index["weight_map"]["mtp.0.norm.weight"] = mixed.name
    (damaged / INDEX).write_text(json.dumps(index))
    with Checkpoint.open(damaged) as checkpoint:
        assert not any(entry.name.startswith("mtp") for entry in checkpoint.entries)
        assert sum(1 for _ in checkpoint.stream()) == len(checkpoint.entries)
        with pytest.raises(ConfigError, match=r"mtp\.0\.norm\.weight: is not read"):
            copy(checkpoint, tmp_path / "copied", {})


def rewrite(folder: Path, name: str, change: Any) -> None:
    """Replace one tensor of a shard; `change` of None drops it from file and index."""
    index = json.loads((folder / INDEX).read_text())
    path = folder / index["weight_map"][name]
    with safe_open(path, "pt") as file:
        tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    found = tensors.pop(name)
    if change is None:
        del index["weight_map"][name]
        (folder / INDEX).write_text(json.dumps(index))
    else:
        tensors[name] = change(found)
    save_file(tensors, path)


TID, APE = "layers.0.ffn.gate.tid2eid", "layers.1.attn.compressor.ape"


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        (TID, lambda t: t.to(torch.float32), f"{TID}: found dtype F32, wanted I64"),
        (TID, lambda t: t[:, :1].contiguous(), rf"{TID}: found shape \[1024, 1\], wanted"),
        (APE, lambda t: t[:2].contiguous(), rf"{APE}: found shape \[2, 192\], wanted \[4, 192\]"),
        (APE, lambda t: t * torch.inf, f"{APE}: found a NaN or infinite value"),
        (APE, None, f"{APE}: missing: not found in the index"),
        ("hc_head_fn", None, "hc_head_fn: missing: not found in the index"),
        (
            "layers.1.attn.wq_a.scale",
            lambda t: t.view(torch.uint8).fill_(255).view(torch.float8_e8m0fnu),
            "found a NaN scale",
        ),
    ],
)
def test_damage_is_refused_with_the_right_sentence(
    damaged: Path, sound: Path, name: str, change: Any, message: str
) -> None:
    rewrite(damaged, name, change)
    assert contents(damaged) != contents(sound)
    with pytest.raises(CheckpointError, match=message):
        values_of(damaged)


def test_an_expert_that_does_not_exist_is_refused_at_load(damaged: Path) -> None:
    rewrite(damaged, TID, lambda t: t + 2)
    with pytest.raises(ConfigError, match=rf"{TID}: found experts 2\.\.5, wanted 0\.\.3"):
        load_trunk(damaged, Numerics.FAST)


def test_a_missing_and_a_cut_shard(damaged: Path) -> None:
    last = max(damaged.glob("model-*.safetensors"))
    whole = last.read_bytes()
    last.write_bytes(whole[:-1])
    with pytest.raises(CheckpointError, match=last.name):
        values_of(damaged)
    last.unlink()
    with pytest.raises(CheckpointError, match=last.name):
        values_of(damaged)
