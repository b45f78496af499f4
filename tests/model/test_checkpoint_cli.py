"""The commands for people: what they print, what they refuse, what they leave behind."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from headrace.model import Numerics
from headrace.model.checkpoint import Checkpoint, Quantisation, Selection, load_trunk
from headrace.model.cli import app, parse_bytes
from headrace.model.errors import ConfigError


def run(*args: object, code: int = 0) -> tuple[str, str]:
    """Standard output and standard error of one command."""
    result = CliRunner().invoke(app, [str(arg) for arg in args], terminal_width=200)
    assert result.exit_code == code, result.output
    return result.stdout, result.stderr


def run_json(*args: object) -> dict[str, Any]:
    value: dict[str, Any] = json.loads(run(*args, "--json")[0])
    return value


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cli") / "toy"
    run("random", "toy", folder, "--seed", 4, "--max-shard", "500kB")
    return folder


def test_layout_prints_flash(tmp_path: Path) -> None:
    value = run_json("layout", "flash", "--memory", "141GB", "--tp", 4, "--keep", 200)
    assert (value["bytes_per_token"], value["block_bytes"]) == (890, 113_920)
    assert (value["window_record_bytes"], value["slot_bytes"]) == (1_341_120, 3_128_352)
    assert value["keep_tokens"] == 200
    assert value["memory_bytes"] == 141_000_000_000
    assert {fit["build"] for fit in value["fits"]} == {"decode", "prefill"}
    text, _ = run("layout", "toy", "--backtrack", 3)
    assert "rings of 35 rows = window 32 + 3" in text
    picture = tmp_path / "toy.png"
    run("layout", "toy", "--png", picture)
    assert picture.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


def test_layout_takes_names_files_and_checkpoints(toy: Path) -> None:
    by_name = run_json("layout", "toy")
    assert run_json("layout", toy) == by_name
    assert run_json("layout", toy / "config.json") == by_name


def test_random_is_complete_and_runs(toy: Path) -> None:
    names = {path.name for path in toy.iterdir()}
    assert names >= {"config.json", "tokenizer.json", "model.safetensors.index.json"}
    value = run_json("inspect", toy, "--values", "--verify")
    assert value["tensors"] == 423
    assert value["weight_block"] == [32, 32]
    assert value["bytes"] == sum(part["bytes"] for part in value["parts"].values())
    assert value["read_bytes"] > 2 * value["bytes"]  # decoded once, digested once
    assert value["selections"]["encoder"] < value["selections"]["text"] < value["bytes"]
    text, _ = run("inspect", toy)
    assert "FP8 32x32, experts FP4" in text
    assert value["tensors_sha256"] in text.replace("\n", "").replace(" ", "")
    assert load_trunk(toy, Numerics.FAST).config.vocab_size == 1024


def test_convert_changes_formats_parts_and_names(toy: Path, tmp_path: Path) -> None:
    target = tmp_path / "other"
    options = ("--block", 128, "--experts", "fp8", "--parts", "text", "--prefix")
    value = run_json("convert", toy, target, *options)
    assert value["weight_block"] == [128, 128]
    assert set(value["parts"]) == {part.value for part in Selection.TEXT.parts}
    with Checkpoint.open(target, None) as checkpoint:
        assert checkpoint.release.quantisation == Quantisation((128, 128), "fp8")
        assert checkpoint.index.tensors["norm.weight"].raw_name == "model.norm.weight"
    assert (target / "tokenizer.json").read_bytes() == (toy / "tokenizer.json").read_bytes()
    same = tmp_path / "same"
    run("convert", toy, same, "--max-shard", "500kB")
    assert {p.name: p.read_bytes() for p in same.iterdir()} == {
        p.name: p.read_bytes() for p in toy.iterdir()
    }


def test_digest_that_does_not_match_is_refused(toy: Path, tmp_path: Path) -> None:
    folder = tmp_path / "altered"
    run("convert", toy, folder)
    shard = folder / "model-00001-of-00001.safetensors"
    raw = bytearray(shard.read_bytes())
    raw[-1] ^= 1  # a bit of the last weight: finite as before
    shard.write_bytes(raw)
    run("inspect", folder, "--values")
    _, message = run("inspect", folder, "--verify", code=1)
    assert "tensors_sha256: found" in message


def test_refusals_are_one_line_and_say_what_is_wrong(toy: Path, tmp_path: Path) -> None:
    cases = [
        (("layout", "nothing"), "model 'nothing' is not known; known are demo, flash, t1, t2, toy"),
        (("layout", "toy", "--keep", 5), "keep_tokens must be at least the window (32), got 5"),
        (("layout", "toy", "--memory", "much"), "--memory: found 'much', wanted a size such as"),
        (("layout", tmp_path / "no.json"), "no.json: missing"),
        (("inspect", tmp_path), "config.json: missing"),
        (("random", "toy", toy), "toy: exists already"),
        (("random", "toy", tmp_path / "x", "--block", 64), "weight_block_size: found [64, 64]"),
        (("random", "toy", tmp_path / "x", "--tokenizer", "no.json"), "--tokenizer: no.json does"),
        (("convert", toy, toy), "toy: exists already"),
        (("convert", toy, tmp_path / "x", "--experts", "int4"), "expert_dtype: found 'int4'"),
    ]
    for args, message in cases:
        out, err = run(*args, code=1)
        assert out == ""
        lines = [line for line in err.splitlines() if "error:" in line]
        assert len(lines) == 1 and message in lines[0], (args, err)
    assert not list(tmp_path.iterdir())


def test_a_disk_that_is_too_full_is_seen_before_any_work(
    toy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: real._replace(free=1_000_000))
    for args in (("random", "toy"), ("convert", toy)):
        _, message = run(*args, tmp_path / "new" / "big", code=1)
        assert "big: needs 2.38 MB of disk, 1 MB are free" in message
    assert not list(tmp_path.iterdir())


def test_progress_goes_to_standard_error_and_json_stays_alone(toy: Path, tmp_path: Path) -> None:
    out, err = run("random", "toy", tmp_path / "a", "--seed", 4)
    assert "writing" in err and "writing" not in out
    assert run("random", "toy", tmp_path / "b", "--json")[1] == ""


def test_help_explains_every_option() -> None:
    text, _ = run("--help")
    for command in ("layout", "inspect", "convert", "random"):
        assert command in text
        shown = run(command, "--help")[0]
        options = [line.split("--")[1] for line in shown.splitlines() if "│ --" in line]
        assert options
        assert all(len(line.split()) > 2 for line in options), options


def test_sizes_are_read_by_their_units() -> None:
    sizes = {"5": 5, "141GB": 141 * 10**9, "80 GiB": 80 << 30, "1.5kB": 1500, "2KiB": 2048}
    assert {text: parse_bytes(text, "--memory") for text in sizes} == sizes
    for text in ("", "GB", "1gb", "-3GB", "1e9", "1 PB"):
        with pytest.raises(ConfigError, match="--memory: found"):
            parse_bytes(text, "--memory")
