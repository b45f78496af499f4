"""The loss curves that are kept beside a checkpoint."""

from __future__ import annotations

import json
from pathlib import Path

from headrace.model.training.curves import DRAFTER, MAX_CURVE_BYTES, TRAINING, curves_of, read_curve
from headrace.model.training.export import kept_curves


def report(step: int, loss: float) -> str:
    return json.dumps({"step": step, "loss": loss, "parts": {"prose": loss + 1, "recall": 0.5}})


def drafts(step: int) -> str:
    line = {"drafter_step": step, "divergence": [2.5], "accepted": [0.5, 0.25]}
    return json.dumps(line)


def written(folder: Path, *lines: str) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "log.jsonl").write_text("\n".join(lines) + "\n")
    return folder


def test_a_log_becomes_tables_and_steps_taken_again_count_once(tmp_path: Path) -> None:
    other = json.dumps({"held_out_bits_a_byte": {"austen": 1.4}})
    lines = [report(25, 3.0), report(50, 2.0), report(25, 2.9), drafts(50), other]
    made = curves_of(written(tmp_path / "run", *lines) / "log.jsonl")
    assert made == {
        TRAINING: "step,loss,loss_prose,loss_recall\n25,2.9,3.9,0.5\n50,2.0,3.0,0.5\n",
        DRAFTER: "drafter_step,divergence,accepted_1,accepted_2\n50,2.5,0.5,0.25\n",
    }
    file = tmp_path / TRAINING
    file.write_text(made[TRAINING])
    assert read_curve(file)["loss"] == [2.9, 2.0]


def test_a_long_run_is_thinned_to_the_limit_and_keeps_both_ends(tmp_path: Path) -> None:
    lines = [report(step, 1 / step) for step in range(1, 10_001)]
    text = curves_of(written(tmp_path / "run", *lines) / "log.jsonl")[TRAINING]
    steps = [int(line.split(",")[0]) for line in text.splitlines()[1:]]
    assert MAX_CURVE_BYTES / 2 < len(text) <= MAX_CURVE_BYTES
    assert (steps[0], steps[-1]) == (1, 10_000) and steps == sorted(set(steps))


def test_an_export_takes_curves_from_where_its_parts_come_from(tmp_path: Path) -> None:
    checkpoint = tmp_path / "checkpoint"
    checkpoint.mkdir()
    (checkpoint / TRAINING).write_text("step\n1\n")
    (checkpoint / DRAFTER).write_text("drafter_step\n1\n")
    run = written(tmp_path / "run", drafts(100), report(7, 1.0))
    of_checkpoint = kept_curves(checkpoint, None)
    assert {name: text.decode()[-2:] for name, text in of_checkpoint.items()} == {
        TRAINING: "1\n",
        DRAFTER: "1\n",
    }
    both = kept_curves(checkpoint, run / "drafter.safetensors")
    assert both[TRAINING] == of_checkpoint[TRAINING]
    assert both[DRAFTER] == curves_of(run / "log.jsonl")[DRAFTER].encode()
    assert kept_curves(run, None)[TRAINING].decode().startswith("step,loss,loss_prose")
