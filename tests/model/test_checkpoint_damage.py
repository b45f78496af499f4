"""Damaged checkpoints: each is refused with the tensor or file, the found and the wanted.

Every damage is checked to have taken effect: the folder's bytes differ and the undamaged one reads.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from headrace.core.errors import HeadraceError
from headrace.model import ConfigError, ModelConfig
from headrace.model.checkpoint import (
    Checkpoint,
    CheckpointError,
    Quantisation,
    ReleaseConfig,
    Selection,
    write_random,
)

INDEX = "model.safetensors.index.json"
FIRST = "model-00001-of-00003.safetensors"
LAST = "model-00003-of-00003.safetensors"
WKV = "layers.3.attn.wkv"


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sound") / "toy"
    release = ReleaseConfig(ModelConfig.load("toy"), Quantisation())
    write_random(folder, release, 1, max_shard_bytes=900_000)
    assert len(list(folder.glob("*.safetensors"))) == 3
    read_all(folder)
    return folder


def read_all(folder: Path) -> None:
    with Checkpoint.open(folder) as checkpoint:
        for _ in checkpoint.stream():
            pass


# ---- tools that damage ---------------------------------------------------------------------


def edit_json(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    document = json.loads(path.read_text())
    change(document)
    path.write_text(json.dumps(document))


def in_map(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    edit_json(folder / INDEX, lambda document: change(document["weight_map"]))


def file_of(folder: Path, name: str) -> Path:
    weight_map: dict[str, str] = json.loads((folder / INDEX).read_text())["weight_map"]
    return folder / weight_map[name]


def edit_header(
    path: Path, change: Callable[[dict[str, Any]], Any], data: bytes | None = None
) -> None:
    """Rewrite a shard's header; its data stay, or are replaced."""
    raw = path.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length])
    change(header)
    text = json.dumps(header).encode()
    body = raw[8 + length :] if data is None else data
    path.write_bytes(len(text).to_bytes(8, "little") + text + body)


def set_field(folder: Path, name: str, field: str, value: Any) -> None:
    edit_header(file_of(folder, name), lambda header: header[name].update({field: value}))


def overwrite(folder: Path, name: str, content: bytes, at: int = 0) -> None:
    """Put bytes into a tensor's data."""
    path = file_of(folder, name)
    raw = bytearray(path.read_bytes())
    length = int.from_bytes(raw[:8], "little")
    begin = 8 + length + json.loads(raw[8 : 8 + length])[name]["data_offsets"][0] + at
    raw[begin : begin + len(content)] = content
    path.write_bytes(raw)


def add_tensor(path: Path, name: str, dtype: str, shape: list[int], content: bytes) -> None:
    raw = path.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    body = raw[8 + length :]
    entry = {"dtype": dtype, "shape": shape, "data_offsets": [len(body), len(body) + len(content)]}
    edit_header(path, lambda header: header.update({name: entry}), body + content)


def cut(path: Path, n_bytes: int) -> None:
    os.truncate(path, path.stat().st_size - n_bytes)


def repeat_key_in_index(folder: Path) -> None:
    """The same tensor twice in the index's own text, in two files."""
    text = (folder / INDEX).read_text()
    line = f'"norm.weight": "{FIRST}",'
    (folder / INDEX).write_text(text.replace('"weight_map": {', '"weight_map": {' + line))


def swap_offsets(folder: Path) -> None:
    def change(header: dict[str, Any]) -> None:
        a, b = header["norm.weight"], header["layers.3.ffn_norm.weight"]
        assert a["shape"] == b["shape"]
        b["data_offsets"] = list(a["data_offsets"])

    assert file_of(folder, "norm.weight") == file_of(folder, "layers.3.ffn_norm.weight")
    edit_header(file_of(folder, "norm.weight"), change)


def lie_about_header(folder: Path, length: int) -> None:
    raw = (folder / FIRST).read_bytes()
    (folder / FIRST).write_bytes(length.to_bytes(8, "little") + raw[8:])


def rename_tensor(folder: Path, old: str, new: str) -> None:
    path = file_of(folder, old)
    edit_header(path, lambda header: header.update({new: header.pop(old)}))
    in_map(folder, lambda names: names.update({new: names.pop(old)}))


DAMAGES: dict[str, tuple[Callable[[Path], Any], str]] = {
    # files
    "missing shard": (lambda f: (f / LAST).unlink(), f"{LAST}: shard missing from the checkpoint"),
    "truncated data": (
        lambda f: cut(f / FIRST, 1),
        rf"{FIRST}: truncated, found \d+ bytes, wanted \d+",
    ),
    "truncated in the header": (
        lambda f: os.truncate(f / FIRST, 100),
        rf"{FIRST}: found a header of \d+ bytes, wanted at most 92",
    ),
    "empty shard": (lambda f: os.truncate(f / FIRST, 0), f"{FIRST}: truncated, found 0 bytes"),
    "bytes after the last tensor": (
        lambda f: (f / FIRST).write_bytes((f / FIRST).read_bytes() + b"x"),
        f"{FIRST}: found .* bytes of no tensor",
    ),
    "header larger than the file": (
        lambda f: lie_about_header(f, 1 << 40),
        f"{FIRST}: found a header of 1099511627776 bytes, wanted at most 901",
    ),
    "header that is no JSON": (
        lambda f: lie_about_header(f, 9),
        f"{FIRST}: header: not valid JSON",
    ),
    "header of nested lists": (
        lambda f: (f / FIRST).write_bytes(
            (200_000).to_bytes(8, "little") + b"[" * 100_000 + b"]" * 100_000
        ),
        f"{FIRST}: header: not valid JSON .RecursionError",
    ),
    "shard is a folder": (
        lambda f: ((f / FIRST).unlink(), (f / FIRST).mkdir()),
        f"{FIRST}: found a folder, wanted a regular file",
    ),
    "shard is a pipe": (
        lambda f: ((f / FIRST).unlink(), os.mkfifo(f / FIRST)),
        f"{FIRST}: found a pipe, wanted a regular file",
    ),
    # headers
    "dtype of another kind": (
        lambda f: set_field(f, f"{WKV}.weight", "dtype", "I8"),
        f"{WKV}.weight: found dtype I8, wanted F8_E4M3",
    ),
    "dtype nobody knows": (
        lambda f: set_field(f, f"{WKV}.weight", "dtype", "F7"),
        f"{WKV}.weight: found dtype 'F7', wanted one of BF16, F32",
    ),
    "shape turned over": (
        lambda f: set_field(f, f"{WKV}.weight", "shape", [128, 32]),
        rf"{WKV}.weight: found shape \[128, 32\], wanted \[32, 128\]",
    ),
    "shape of other size": (
        lambda f: set_field(f, f"{WKV}.weight", "shape", [32, 129]),
        rf"{WKV}.weight: found 4096 bytes, wanted 4128 for F8_E4M3 \[32, 129\]",
    ),
    "negative size": (
        lambda f: set_field(f, f"{WKV}.weight", "shape", [-32, -128]),
        rf"{WKV}.weight: found shape \[-32, -128\] and data_offsets .* wanted at most 64 sizes",
    ),
    "tensors on top of each other": (swap_offsets, "tensors overlap or leave a gap"),
    "field missing": (
        lambda f: edit_header(
            file_of(f, "norm.weight"), lambda header: header["norm.weight"].pop("dtype")
        ),
        "norm.weight: found .*shape.*, wanted dtype, shape and data_offsets",
    ),
    "metadata of numbers": (
        lambda f: edit_header(f / FIRST, lambda header: header.update(__metadata__={"a": 1})),
        f"{FIRST}: __metadata__: found {{'a': 1}}, wanted a table of strings",
    ),
    # values
    "NaN scale": (
        lambda f: overwrite(f, f"{WKV}.scale", b"\xff", at=2),
        f"{WKV}.weight: found a NaN scale",
    ),
    "NaN scale of an expert": (
        lambda f: overwrite(f, "layers.0.ffn.experts.7.w2.scale", b"\xff"),
        "layers.0.ffn.experts.7.w2.weight: found a NaN scale",
    ),
    "NaN code": (
        lambda f: overwrite(f, f"{WKV}.weight", b"\x7f", at=4095),
        f"{WKV}.weight: found a NaN or infinite value",
    ),
    "infinite norm weight": (
        lambda f: overwrite(f, "norm.weight", b"\x80\x7f"),
        "norm.weight: found a NaN or infinite value",
    ),
    # index against shards
    "duplicate tensor in two shards": (
        lambda f: add_tensor(f / FIRST, "norm.weight", "BF16", [128], bytes(256)),
        f"norm.weight: found in {FIRST} and, by the index, in .*, wanted once",
    ),
    "duplicate tensor in the index": (repeat_key_in_index, "norm.weight: found twice"),
    "with and without prefix": (
        lambda f: in_map(f, lambda names: names.update({"model.norm.weight": FIRST})),
        "norm.weight: found with and without prefix 'model.', wanted once",
    ),
    "index names an absent tensor": (
        lambda f: in_map(f, lambda names: names.update({"norm.weight": FIRST})),
        f"norm.weight: not found in {FIRST}, wanted there by the index",
    ),
    "tensor gone from its shard": (
        lambda f: edit_header(f / FIRST, lambda header: header.pop("embed.weight")),
        r"found its start at byte \d+, wanted \d+: tensors overlap or leave a gap",
    ),
    "tensor that the index does not list": (
        lambda f: in_map(f, lambda names: names.pop("mtp.0.ffn.gate.bias_vl")),
        r"mtp.0.ffn.gate.bias_vl: found in .* and not in the index, wanted in both",
    ),
    "missing tensor": (
        lambda f: in_map(f, lambda names: names.pop("head.weight")),
        "head.weight: missing: not found in the index, wanted for the head part",
    ),
    "weight without its scale": (
        lambda f: in_map(f, lambda names: names.pop(f"{WKV}.scale")),
        f"{WKV}.scale: missing: not found in the index, wanted for the decoder part",
    ),
    "unknown tensor": (
        lambda f: rename_tensor(f, "norm.weight", "layers.4.attn_norm.weight"),
        "layers.4.attn_norm.weight: unknown tensor: found in the index, wanted by no part",
    ),
    "path traversal": (
        lambda f: in_map(f, lambda names: names.update({"norm.weight": "../x.safetensors"})),
        r"norm.weight: found file '\.\./x.safetensors' in the index, wanted the name of a .safe",
    ),
    "absolute path": (
        lambda f: in_map(f, lambda names: names.update({"norm.weight": "/etc/x.safetensors"})),
        "norm.weight: found file '/etc/x.safetensors' in the index",
    ),
    "file of another kind": (
        lambda f: in_map(f, lambda names: names.update({"norm.weight": "config.json"})),
        "norm.weight: found file 'config.json' in the index",
    ),
    "file that is a number": (
        lambda f: in_map(f, lambda names: names.update({"norm.weight": 3})),
        "norm.weight: found file '3' in the index",
    ),
    "index without a map": (
        lambda f: (f / INDEX).write_text("{}"),
        f"{INDEX}: found weight_map NoneType, metadata dict, wanted two objects",
    ),
    "index without tensors": (
        lambda f: in_map(f, lambda names: names.clear()),
        f"{INDEX}: found an empty weight_map, wanted tensors in it",
    ),
    "total that is a list": (
        lambda f: edit_json(f / INDEX, lambda d: d["metadata"].update(total_size=[])),
        rf"{INDEX}: total_size: found \[\], wanted bytes",
    ),
    "total below zero": (
        lambda f: edit_json(f / INDEX, lambda d: d["metadata"].update(total_size=-1)),
        f"{INDEX}: total_size: found -1, wanted bytes",
    ),
    "architectures that are no list": (
        lambda f: edit_json(f / "config.json", lambda d: d.update(architectures={"a": 1})),
        "architectures: found {'a': 1}, wanted a list of names",
    ),
    "dtype that is a list": (
        lambda f: edit_header(f / FIRST, lambda h: list(h.values())[-1].update(dtype=[])),
        r"found dtype \[\], wanted one of",
    ),
    "index that is a list": (
        lambda f: (f / INDEX).write_text("[]"),
        f"{INDEX}: found list, wanted a JSON object",
    ),
    "no index": (
        lambda f: (f / INDEX).unlink(),
        f"{INDEX}: missing: found neither it nor model.safetensors, wanted one",
    ),
    # configuration
    "no configuration": (lambda f: (f / "config.json").unlink(), "config.json: missing"),
    "configuration cut short": (
        lambda f: cut(f / "config.json", 5),
        "config.json: not valid JSON",
    ),
    "key twice in the configuration": (
        lambda f: (f / "config.json").write_text(
            (f / "config.json").read_text().replace("{", '{"dtype": "float16",', 1)
        ),
        "dtype: found twice",
    ),
    "configuration of a wider model": (
        lambda f: edit_json(
            f / "config.json", lambda document: document["text_config"].update(q_lora_rank=96)
        ),
        r"layers.0.attn.wq_a.weight: found shape \[64, 128\], wanted \[96, 128\]",
    ),
    "configuration of larger blocks": (
        lambda f: edit_json(
            f / "config.json",
            lambda document: document["quantization_config"].update(weight_block_size=[128, 128]),
        ),
        r"layers.0.attn.wq_a.scale: found shape \[2, 4\], wanted \[1, 1\]",
    ),
    "unknown key": (
        lambda f: edit_json(
            f / "config.json", lambda document: document["text_config"].update(n_ghosts=1)
        ),
        "text_config.n_ghosts: unknown key, found 1, wanted it removed",
    ),
}


def contents(folder: Path) -> dict[str, bytes | None]:
    return {p.name: p.read_bytes() if p.is_file() else None for p in folder.iterdir()}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_is_refused_with_the_right_sentence(
    sound: Path, tmp_path: Path, damage: str
) -> None:
    folder = tmp_path / "toy"
    shutil.copytree(sound, folder)
    inflict, message = DAMAGES[damage]
    inflict(folder)
    assert contents(folder) != contents(sound)
    with pytest.raises((CheckpointError, ConfigError), match=message) as refusal:
        read_all(folder)
    assert isinstance(refusal.value, HeadraceError)
    assert str(tmp_path) not in refusal.value.message
    assert {"found", "wanted"} <= set(re.findall(r"\w+", refusal.value.message))


def test_a_file_cut_short_after_it_was_opened_is_refused(sound: Path, tmp_path: Path) -> None:
    """A mapped file would end the process here."""
    folder = tmp_path / "toy"
    shutil.copytree(sound, folder)
    with Checkpoint.open(folder) as checkpoint:
        stream = checkpoint.stream()
        next(stream)
        cut(folder / LAST, 4096)
        with pytest.raises(CheckpointError, match=f"{LAST}: cut short while it was read"):
            for _ in stream:
                pass


def test_damage_outside_of_the_selection_is_not_seen(sound: Path, tmp_path: Path) -> None:
    """An encoder's host does not need the last shard, whole or not; its own shards it does."""
    folder = tmp_path / "toy"
    shutil.copytree(sound, folder)
    with Checkpoint.open(folder, Selection.ENCODER) as checkpoint:
        needed = {shard.name for shard in checkpoint.shards}
    assert needed == {FIRST, "model-00002-of-00003.safetensors"}
    cut(folder / LAST, 1)
    with Checkpoint.open(folder, Selection.ENCODER) as checkpoint:
        assert sum(1 for _ in checkpoint.stream()) == len(checkpoint.entries)
    cut(folder / FIRST, 1)
    with pytest.raises(CheckpointError, match=f"{FIRST}: truncated"):
        Checkpoint.open(folder, Selection.ENCODER)


def test_links_to_shards_are_followed(sound: Path, tmp_path: Path) -> None:
    """Download caches keep files elsewhere and link to them."""
    folder = tmp_path / "linked"
    folder.mkdir()
    for path in sound.iterdir():
        (folder / path.name).symlink_to(path)
    read_all(folder)
