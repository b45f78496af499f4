"""The model card's commands on a CPU with a tiny budget."""

from __future__ import annotations

import json
import sys

import pytest
import torch
from safetensors.torch import load_file

from headrace.model import ConfigError
from headrace.model.config import checkpoint_folder
from headrace.model.training import train
from headrace.model.training.export import trained_tensors


def test_a_drafter_is_trained_on_a_checkpoint_and_takes_the_place_of_its_own(tmp_path, monkeypatch):
    """`--resume CHECKPOINT --stop-at 0 --drafter-seconds S`, then `export --drafter`: a few
    steps change the drafter's tensors, nearly all of them, and no other."""
    folder = checkpoint_folder("demo")
    command = ["train", "--config", str(folder / "config.json"), "--resume", str(folder)]
    command += ["--stop-at", "0", "--steps", "1", "--drafter-seconds", "0.01", "--batch", "1"]
    command += ["--length", "200", "--pictures", "1", "--drafter-anchors", "24", "--every", "2"]
    monkeypatch.setattr(sys, "argv", [*command, "--device", "cpu", "--out", str(tmp_path)])
    monkeypatch.setattr(train, "WARM_STEPS", 6)
    train.main()
    lines = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "drafter_step" in line]
    assert steps[-1]["drafter_step"] == 12
    before = trained_tensors(folder / "config.json", folder, None)
    after = trained_tensors(folder / "config.json", folder, tmp_path / "drafter.safetensors")
    made = load_file(tmp_path / "drafter.safetensors")
    assert before.keys() == after.keys()
    assert {name for name in before if name.startswith("mtp.")} == made.keys()
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed <= made.keys() and len(changed) > 0.9 * len(made)


def test_a_folder_of_no_weights_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"neither weights-\*\.safetensors nor config\.json"):
        trained_tensors(checkpoint_folder("demo") / "config.json", tmp_path, None)


def test_a_mix_of_unknown_parts_or_shares_is_refused(tmp_path, monkeypatch):
    config = checkpoint_folder("demo") / "config.json"
    base = ["train", "--config", str(config), "--steps", "1", "--out", str(tmp_path)]
    for more, said in (
        (["--mix", "poems=0.5"], r"mix: found 'poems'"),
        (["--mix", "pictures=0.5"], r"mix: found 'pictures', .*--pictures"),
        (["--mix", "recall=0"], r"mix: found recall=0\.0, wanted more than 0"),
        (["--long-recall", "1.5"], r"long-recall: found 1\.5, wanted in 0\.\.1"),
    ):
        monkeypatch.setattr(sys, "argv", [*base, *more, "--device", "cpu"])
        with pytest.raises(ConfigError, match=said):
            train.main()
