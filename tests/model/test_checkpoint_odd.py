"""Files of a checkpoint with values of any type: refused in our words, or said and read."""

from __future__ import annotations

import contextlib
import copy
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from headrace.core.deployment import Deployment
from headrace.core.errors import HeadraceError
from headrace.model import ModelConfig
from headrace.model.checkpoint import (
    Checkpoint,
    CheckpointError,
    Quantisation,
    ReleaseConfig,
    write_random,
)
from headrace.model.checkpoint.release import read_config
from headrace.model.checkpoint.remarks import check_architectures
from headrace.model.checkpoint.shards import parse_header
from headrace.model.served import ServedModel

INDEX = "model.safetensors.index.json"
FIRST = "model-00001-of-00003.safetensors"


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sound") / "toy"
    release = ReleaseConfig(ModelConfig.load("toy"), Quantisation())
    write_random(folder, release, 1, max_shard_bytes=900_000)
    return folder


def edit_json(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    document = json.loads(path.read_text())
    change(document)
    path.write_text(json.dumps(document))


SOUND_HEADER = {"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}
ODD = [
    [],
    {},
    [[]],
    "",
    "F32",
    "\ud800",
    True,
    None,
    1.5,
    -1,
    2**63,
    10**4000,
    1e308,
    [10**4000] * 2,
]
ODD += [[2**62] * 64, [2**62] * 65, [0, 8], [8, 0], [0, 10**4299]]


@pytest.mark.parametrize("place", ["dtype", "shape", "data_offsets", "a", "__metadata__"])
def test_any_value_in_a_header_ends_in_one_kind_of_error(place: str) -> None:
    parse_header("s", json.dumps(SOUND_HEADER).encode(), 0, 8)
    for first in ODD:
        for second in ODD:
            header: dict[str, Any] = json.loads(json.dumps(SOUND_HEADER))
            inner = header["a"] if place in header["a"] else header
            inner[place] = copy.deepcopy(first)
            if isinstance(header["a"], dict) and place != "shape":
                header["a"]["shape"] = copy.deepcopy(second)
            with contextlib.suppress(CheckpointError):
                parse_header("s", json.dumps(header).encode(), 0, 8)


def test_any_value_in_a_configuration_ends_in_one_kind_of_error(sound: Path) -> None:
    good = json.loads((sound / "config.json").read_text())
    refused = 0
    for inner in (good, *(value for value in good.values() if isinstance(value, dict))):
        for key, kept in list(inner.items()):
            for value in ODD:
                inner[key] = value
                try:
                    check_architectures(good, read_config(good).model)
                except HeadraceError:
                    refused += 1
            inner[key] = kept
    read_config(good)
    assert refused > 100


def test_what_looks_wrong_and_harms_nothing_is_said(
    sound: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "toy"
    shutil.copytree(sound, folder)
    Checkpoint.open(folder).close()
    assert caplog.messages == []
    total = json.loads((folder / INDEX).read_text())["metadata"]["total_size"]
    edit_json(folder / INDEX, lambda d: d["metadata"].update(total_size=total + 1))
    edit_json(folder / "config.json", lambda d: d.update(architectures=["LlamaForCausalLM"]))
    shutil.copy(folder / FIRST, folder / "other.safetensors")
    Checkpoint.open(folder).close()
    assert caplog.messages == [
        "architectures: found ['LlamaForCausalLM'], wanted DeepseekV41For..; read by its keys",
        "other.safetensors: found beside the checkpoint, not in the index: not read",
        f"{INDEX}: total_size: found {total + 1}, the files hold {total} bytes",
    ]


def test_a_damaged_folder_is_refused_before_any_role_reads_a_weight(
    sound: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "toy"
    shutil.copytree(sound, folder)
    served = ServedModel(Deployment(model="mine", checkpoint=str(folder)))
    served.check(vision=True)
    number = (folder / FIRST).stat().st_size
    os.truncate(folder / FIRST, number - 1)
    with pytest.raises(CheckpointError, match=rf"{FIRST}: truncated, found {number - 1} bytes"):
        served.check(vision=True)
    (folder / FIRST).unlink()
    with pytest.raises(CheckpointError, match=f"{FIRST}: shard missing"):
        served.check()
