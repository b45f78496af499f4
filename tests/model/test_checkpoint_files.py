"""Reading and writing whole checkpoints: bytes that come back, bytes that are counted."""

from __future__ import annotations

import json
import shutil
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from headrace.model import ConfigError, ModelConfig
from headrace.model.checkpoint import (
    Checkpoint,
    CheckpointError,
    Progress,
    Quantisation,
    ReleaseConfig,
    Selection,
    convert,
    copy,
    quantise,
    tensor_table,
    tensors_digest,
    widen,
    write_random,
    write_values,
)
from headrace.model.checkpoint import reader as reader_module

SHARD_BYTES = 150_000
TOY = ReleaseConfig(ModelConfig.load("toy"), Quantisation())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("files") / "toy"
    write_random(path, TOY, 1, max_shard_bytes=SHARD_BYTES)
    return path


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def values_of(folder: Path, selection: Selection | None = None) -> dict[str, torch.Tensor]:
    with Checkpoint.open(folder, selection) as checkpoint:
        return dict(checkpoint.stream())


def document_of(folder: Path) -> dict[str, object]:
    document: dict[str, object] = json.loads((folder / "config.json").read_text())
    return document


# ---- round trips ---------------------------------------------------------------------------


def test_same_seed_gives_the_same_bytes_and_another_does_not(folder: Path, tmp_path: Path) -> None:
    write_random(tmp_path / "again", TOY, 1, max_shard_bytes=SHARD_BYTES)
    assert contents(tmp_path / "again") == contents(folder)
    assert len(contents(folder)) > 12
    write_random(tmp_path / "other", TOY, 2, max_shard_bytes=SHARD_BYTES)
    assert contents(tmp_path / "other").keys() == contents(folder).keys()
    assert contents(tmp_path / "other") != contents(folder)


def test_writing_what_was_read_gives_the_same_folder(folder: Path, tmp_path: Path) -> None:
    """As stored, converted to the same formats, and through the widened values."""
    with Checkpoint.open(folder) as checkpoint:
        copy(checkpoint, tmp_path / "copied", document_of(folder))
        convert(checkpoint, tmp_path / "converted", max_shard_bytes=SHARD_BYTES)
    write_values(
        tmp_path / "encoded",
        TOY,
        values_of(folder),
        selection=Selection.FULL,
        max_shard_bytes=SHARD_BYTES,
    )
    wanted = contents(folder)
    for name in ("copied", "converted", "encoded"):
        assert contents(tmp_path / name) == wanted, name


def test_prefix_and_sharding_change_no_weight(folder: Path, tmp_path: Path) -> None:
    with Checkpoint.open(folder) as checkpoint:
        digest = tensors_digest(checkpoint)
        assert convert(checkpoint, tmp_path / "prefixed", prefix="model.") == digest
    index = json.loads((tmp_path / "prefixed/model.safetensors.index.json").read_text())
    assert index["metadata"]["tensors_sha256"] == digest
    assert all(name.startswith("model.") for name in index["weight_map"])
    assert set(index["weight_map"].values()) == {"model-00001-of-00001.safetensors"}
    with Checkpoint.open(tmp_path / "prefixed") as prefixed:
        convert(prefixed, tmp_path / "back", max_shard_bytes=SHARD_BYTES)
        copy(prefixed, tmp_path / "same", document_of(tmp_path / "prefixed"))
    assert contents(tmp_path / "back") == contents(folder)
    assert contents(tmp_path / "same") == contents(tmp_path / "prefixed")


def test_shards_written_by_the_library_read_and_copy_byte_for_byte(
    folder: Path, tmp_path: Path
) -> None:
    """Other order, other headers, weights and scales in different files; then one file alone."""
    tensors: dict[str, torch.Tensor] = {}
    for path in folder.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            tensors |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    shutil.copy(folder / "config.json", theirs)
    groups = {"a.safetensors": sorted(tensors)[::2], "b.safetensors": sorted(tensors)[1::2]}
    for file_name, names in groups.items():
        save_file({name: tensors[name] for name in names}, theirs / file_name, {"made": "there"})
    weight_map = {name: file_name for file_name, names in groups.items() for name in names}
    text = json.dumps({"metadata": {"total_size": 7}, "weight_map": weight_map}, indent=2)
    index = json.dumps(json.loads(text), indent=2, sort_keys=True) + "\n"
    (theirs / "model.safetensors.index.json").write_text(index)
    wanted = values_of(folder)
    read = values_of(theirs, Selection.FULL)
    assert read.keys() == wanted.keys()
    assert all(torch.equal(read[name], wanted[name]) for name in wanted)
    with Checkpoint.open(theirs) as checkpoint:
        copy(checkpoint, tmp_path / "copied", document_of(folder))
    assert contents(tmp_path / "copied") == contents(theirs)

    single = tmp_path / "single"
    single.mkdir()
    shutil.copy(folder / "config.json", single)
    save_file(tensors, single / "model.safetensors")
    read = values_of(single, Selection.FULL)
    assert all(torch.equal(read[name], wanted[name]) for name in wanted)


def test_the_library_reads_what_was_written(folder: Path) -> None:
    """Names, dtypes, shapes and bytes, against the table of the configuration."""
    table = tensor_table(TOY.model, TOY.quantisation)
    wanted = {s.name: (s.dtype, s.shape) for entry in table for s in entry.stored}
    found, offsets = {}, []
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    with Checkpoint.open(folder) as checkpoint:
        specs = {s.name: s for entry in checkpoint.entries for s in entry.stored}
        for path in sorted(folder.glob("*.safetensors")):
            offsets.append(int.from_bytes(path.read_bytes()[:8], "little") % 8)
            with safe_open(path, "pt") as file:
                for name in file.keys():  # noqa: SIM118
                    part = file.get_slice(name)
                    found[name] = (part.get_dtype(), tuple(part.get_shape()))
                    assert index["weight_map"][name] == path.name
                    data = file.get_tensor(name).contiguous().view(-1).view(torch.uint8)
                    pieces = torch.cat(list(checkpoint.pieces(specs[name])))
                    assert torch.equal(pieces, data), name
    assert found == wanted
    assert offsets == [0] * len(offsets)
    assert index["metadata"]["total_size"] == sum(s.n_bytes for s in specs.values())


# ---- formats -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "quantisation", [None, Quantisation((128, 128), "fp8"), Quantisation((128, 128), "fp4")]
)
def test_conversion_to_other_formats(
    folder: Path,
    tmp_path: Path,
    quantisation: Quantisation | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Every weight is the source's, encoded whole; bands of a few rows make no difference."""
    monkeypatch.setattr(reader_module, "STAGE_BYTES", 6000)
    target = ReleaseConfig(TOY.model, quantisation)
    with Checkpoint.open(folder) as checkpoint:
        convert(checkpoint, tmp_path / "target", target)
    source, found = values_of(folder), values_of(tmp_path / "target")
    changed = 0
    for entry in tensor_table(TOY.model, quantisation):
        wanted = torch.empty(entry.shape)
        widen(entry.name, entry.encoding, *quantise("", entry.encoding, source[entry.name]), wanted)
        assert torch.equal(found[entry.name], wanted), entry.name
        changed += not torch.equal(wanted, source[entry.name])
    assert (changed == 0) == (quantisation is None)  # BF16 holds every stored value
    with Checkpoint.open(tmp_path / "target") as checkpoint:
        assert checkpoint.release == target


def test_conversion_refuses_another_model(folder: Path, tmp_path: Path) -> None:
    other = ReleaseConfig(ModelConfig.load("t1"), Quantisation())
    with (
        Checkpoint.open(folder) as checkpoint,
        pytest.raises(ConfigError, match="model configuration: found another"),
    ):
        convert(checkpoint, tmp_path / "no", other)
    assert not list(tmp_path.iterdir())


# ---- parts, bytes and memory ---------------------------------------------------------------


@pytest.mark.parametrize("selection", list(Selection))
def test_a_selection_reads_its_bytes_and_no_others(folder: Path, selection: Selection) -> None:
    with Checkpoint.open(folder, selection) as checkpoint:
        headers = sum(shard.header.data_offset for shard in checkpoint.shards)
        assert checkpoint.meter.read_bytes == headers
        names = [name for name, _ in checkpoint.stream()]
        assert checkpoint.meter.read_bytes - headers == checkpoint.total_bytes
        lazily = checkpoint.tensors()
        assert list(lazily) == names
        other = (
            next(e.name for e in tensor_table(TOY.model, None) if e.name not in names)
            if (selection is not Selection.FULL)
            else "no.such.weight"
        )
        with pytest.raises(KeyError):
            lazily[other]
    whole = sum(entry.n_bytes for entry in tensor_table(TOY.model, TOY.quantisation))
    assert (checkpoint.total_bytes == whole) == (selection is Selection.FULL)
    assert 0 < checkpoint.total_bytes <= whole


def test_memory_in_hand_is_one_weight_and_one_band(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the reader's own count, and by the tensors that are alive."""
    monkeypatch.setattr(reader_module, "STAGE_BYTES", 4096)
    wanted = values_of(folder)
    largest = max(v.numel() * 4 for v in wanted.values())
    alive: set[str] = set()
    most_alive = 0
    with Checkpoint.open(folder) as checkpoint:
        stream = checkpoint.stream()
        for name, values in stream:
            alive.add(name)
            weakref.finalize(values.untyped_storage(), alive.discard, name)
            most_alive = max(most_alive, len(alive))
            assert torch.equal(values, wanted[name]), name
            del values
        meter = checkpoint.meter
    assert meter.held_bytes == 0
    # A band is 4096 stored bytes or one block of rows (32 rows of at most 512 bytes), as stored
    # and widened to four (or, from MXFP4, eight) times that.
    assert largest < meter.peak_held_bytes <= largest + 32 * 512 * 6
    assert meter.peak_held_bytes < sum(v.numel() * 4 for v in wanted.values()) / 8


def test_progress_ends_where_it_said(folder: Path) -> None:
    for selection in (Selection.FULL, Selection.ENCODER):
        seen: list[Progress] = []
        with Checkpoint.open(folder, selection) as checkpoint:
            for _ in checkpoint.stream(on_progress=seen.append):
                pass
            lazily: list[Progress] = []
            tensors = checkpoint.tensors(on_progress=lazily.append)
            for name in reversed(list(tensors)):
                assert tensors[name] is not tensors[name]  # looked up twice, reported once
        every = [entry.name for entry in checkpoint.entries]
        asked = [entry.name for entry in checkpoint.entries if not entry.optional]
        for reports, names, total_bytes in (
            (seen, every, checkpoint.total_bytes),
            (lazily, asked[::-1], checkpoint.asked_bytes()),  # a model asks for no optional one
        ):
            done = [p.done_bytes for p in reports]
            assert done == sorted(set(done))
            assert done[-1] == reports[0].total_bytes == total_bytes
            assert [p.name for p in reports] == names


def test_present_parts_are_read_where_others_are_absent(tmp_path: Path) -> None:
    text, full = tmp_path / "text", Selection.FULL
    write_random(text, TOY, 3, selection=Selection.TEXT)
    with Checkpoint.open(text, None) as checkpoint:
        present = {entry.part for entry in checkpoint.entries}
    assert present == Selection.TEXT.parts
    with pytest.raises(CheckpointError, match="image_start: missing: not found in the index"):
        Checkpoint.open(text, full)
    with pytest.raises(CheckpointError, match="image_start: missing"):
        Checkpoint.open(text, Selection.VISION)


def test_optional_weight_may_be_absent_and_present(folder: Path, tmp_path: Path) -> None:
    name = "mtp.0.ffn.gate.bias_vl"
    values = values_of(folder)
    assert name in values
    del values[name]
    write_values(tmp_path / "without", TOY, values, selection=Selection.FULL)
    assert values_of(tmp_path / "without", Selection.FULL).keys() == values.keys()
    assert contents(folder).keys() != contents(tmp_path / "without").keys()


# ---- writing that fails --------------------------------------------------------------------


class Failing(dict[str, torch.Tensor]):
    """The weights of a folder but for one, which is given or missing."""

    def __init__(self, values: dict[str, torch.Tensor], name: str, value: torch.Tensor | None):
        super().__init__(values)
        if value is None:
            del self[name]
        else:
            self[name] = value


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (None, "layers.3.attn.wkv.weight: missing from the weights"),
        (torch.zeros(4, 4), r"layers.3.attn.wkv.weight: found shape \[4, 4\], wanted \[32, 128\]"),
        (torch.full((32, 128), torch.nan), "layers.3.attn.wkv.weight: found a NaN"),
        (torch.zeros((32, 128), dtype=torch.float16), "layers.3.attn.wkv.weight: found torch.flo"),
    ],
)
def test_a_failure_leaves_nothing_behind(
    folder: Path, tmp_path: Path, value: torch.Tensor | None, message: str
) -> None:
    values = Failing(values_of(folder), "layers.3.attn.wkv.weight", value)
    with pytest.raises(CheckpointError, match=message):
        write_values(tmp_path / "target", TOY, values)
    assert not list(tmp_path.iterdir())


def test_existing_folders_are_not_touched(folder: Path, tmp_path: Path) -> None:
    before = contents(folder)
    with pytest.raises(ConfigError, match="toy: exists already"):
        write_random(folder, TOY, 9)
    assert contents(folder) == before
    (tmp_path / "new.partial").mkdir()
    with pytest.raises(ConfigError, match="new.partial: left by a run"):
        write_random(tmp_path / "new", TOY, 9)
    for bad in ({"max_shard_bytes": 0}, {"prefix": "net."}):
        with pytest.raises(ConfigError, match=f"{next(iter(bad))}: found"):
            write_random(tmp_path / "other", TOY, 9, **bad)  # type: ignore[arg-type]


@pytest.fixture(autouse=True)
def nothing_stays_open(tmp_path: Path) -> Iterator[None]:
    """No test leaves a shard open: the descriptors before and after are the same."""
    before = set(Path("/proc/self/fd").iterdir())
    yield
    after = set(Path("/proc/self/fd").iterdir())
    assert len(after) <= len(before)
