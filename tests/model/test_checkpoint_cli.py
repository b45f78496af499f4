"""The commands for people: what they print, what they refuse, what they leave behind."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from headrace.cluster.cli import app
from headrace.core.deployment import Deployment
from headrace.model import Numerics, ServedModel, package_tokenizer
from headrace.model.checkpoint import (
    Checkpoint,
    CheckpointError,
    Quantisation,
    Selection,
    load_trunk,
)
from headrace.model.errors import ConfigError
from headrace.model.layout_command import parse_bytes


def run(*args: object, code: int = 0) -> tuple[str, str]:
    """Standard output and standard error of one command."""
    words = [str(arg) for arg in args]
    if words[0] != "layout":
        words.insert(0, "model")
    result = CliRunner().invoke(app, words, terminal_width=200)
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
    assert f"tensors_sha256 {value['tensors_sha256']}" in text.splitlines()
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


def test_a_folder_of_one_part_says_so(toy: Path, tmp_path: Path) -> None:
    half = tmp_path / "half"
    facts = run_json("convert", toy, half, "--parts", "encoder")
    assert facts["parts_lacking"] == ["decoder", "head", "drafter", "vision"]
    assert run_json("inspect", toy)["parts_lacking"] == []
    lines = run("inspect", half)[0].splitlines()
    assert "lacks decoder, head, drafter, vision" in lines
    (loads,) = [line for line in lines if line.startswith("a role loads: ")]
    assert loads.startswith("a role loads: encoder ") and "text" not in loads
    served = ServedModel(Deployment(model="mine", checkpoint=str(half)))
    with pytest.raises(CheckpointError, match=r"half: this folder holds embedding, .*, kv source"):
        served.check()
    text = tmp_path / "text"
    run("convert", toy, text, "--parts", "text")
    served = ServedModel(Deployment(model="mine", checkpoint=str(text)))
    served.check()
    with pytest.raises(CheckpointError, match="wanted also vision"):
        served.check(vision=True)


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


def changed(place: Path, **keys: Any) -> Path:
    """A configuration file of the toy with other values in its text_config."""
    text = (resources.files("headrace.configs") / "models" / "toy.json").read_text()
    document = json.loads(text)
    document["text_config"].update(keys)
    path = place / f"{next(iter(keys))}.json"
    path.write_text(json.dumps(document))
    return path


def check_refused(args: tuple[object, ...], message: str) -> None:
    out, err = run(*args, code=1)
    assert out == ""
    lines = [line for line in err.splitlines() if "error:" in line]
    assert len(lines) == 1 and message in lines[0], (args, err)


def test_refusals_are_one_line_and_say_what_is_wrong(toy: Path, tmp_path: Path) -> None:
    x = tmp_path / "x"
    cases: list[tuple[tuple[object, ...], str]] = [
        (("layout", "nothing"), "CONFIG: found 'nothing', wanted one of demo, flash, t1, t2, toy"),
        (("layout", ""), "CONFIG: found '', wanted one of"),
        (("layout", "n" * 5000), "CONFIG: found 'nnn"),
        (("layout", "toy", "--keep", 5), "keep_tokens must be at least the window (32), got 5"),
        (("layout", "toy", "--keep", 10**30), "keep_tokens: found 1000000000000000000000000000000"),
        (("layout", "toy", "--tp", 0), "tp: found 0, wanted in 1..4096"),
        (("layout", "toy", "--backtrack", -3), "backtrack_rows: found -3, wanted in 1..1024"),
        (
            ("layout", "toy", "--memory", "much"),
            "found 'much', wanted a size with its unit",
        ),
        (("layout", "toy", "--memory", "9" * 400), "--memory: found '999"),
        (("layout", "toy", "--memory", "141"), "found '141', wanted a size with its unit, such"),
        (("layout", "toy", "--memory", "0B"), "memory_bytes: found 0, wanted in 1.."),
        (("layout", "toy", "--png", x / "a.png"), "cannot be written: wanted a file in a folder"),
        (("layout", "toy", "--png", x), "wanted a file name that ends in .png"),
        (("layout", tmp_path / "no.json"), "no.json: missing"),
        (("inspect", tmp_path), "config.json: missing"),
        (("inspect", "/dev/null"), "/dev/null: found no folder, wanted that of a checkpoint"),
        (("random", "toy", toy), "toy: exists already"),
        (("random", "toy", "."), ".: exists already"),
        (("random", "toy", tmp_path / ("n" * 300)), "no folder can have that name"),
        (("random", "toy", toy / "config.json" / "x"), "config.json is no folder"),
        (("random", "toy", "/proc/version/x"), "/proc/version is no folder"),
        (("random", "toy", x, "--seed", -1), "--seed: found -1, wanted in 0..9223372036854775807"),
        (("random", "toy", x, "--seed", 2**63), "--seed: found 9223372036854775808"),
        (("random", "toy", x, "--parts", "all"), "--parts: found 'all', wanted one of full, text"),
        (("random", "toy", x, "--max-shard", "0B"), "--max-shard: found '0B', wanted at least 1"),
        (("random", "toy", x, "--block", 64), "weight_block_size: found [64, 64]"),
        (("random", "toy", x, "--tokenizer", "no.json"), "--tokenizer: no.json is no file"),
        (("random", "toy", x, "--tokenizer", toy / "config.json"), "cannot be read as a tokenizer"),
        (("convert", toy, toy), "toy: exists already"),
        (("convert", toy, x, "--experts", "int4"), "expert_dtype: found 'int4'"),
        (("convert", tmp_path / "absent", x), "absent: found no folder"),
    ]
    for args, message in cases:
        check_refused(args, message)
    assert not list(tmp_path.iterdir())
    large = package_tokenizer(4096)
    large.save(str(tmp_path / "large.json"))
    check_refused(
        ("random", "toy", x, "--tokenizer", tmp_path / "large.json"),
        "--tokenizer: found 4096 ids in large.json, wanted at most the vocabulary's 1024",
    )


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"hidden_size": 10**18}, "hidden_size: found 1000000000000000000, wanted in 1..131072"),
        ({"hidden_size": -128}, "hidden_size: found -128, wanted in 1..131072"),
        ({"n_routed_experts": 10**7}, "n_routed_experts: found 10000000, wanted in 1..16384"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers: found 1000000000, wanted in 1..1024"),
        ({"engram_n_heads": 10**7}, "engram_n_heads: found 10000000, wanted in 1..256"),
        ({"engram_max_ngram_size": 10**6}, "engram_max_ngram_size: found 1000000, wanted in 2..16"),
        ({"num_nextn_predict_layers": 10**8}, "num_nextn_predict_layers: found 100000000"),
        ({"max_position_embeddings": 10**20}, "max_position_embeddings: found 10000000"),
        ({"swiglu_limit": float("nan")}, "NaN is no JSON number"),
        ({"rope_theta": float("inf")}, "Infinity is no JSON number"),
        ({"rope_theta": 0}, "rope_theta: found 0.0, wanted a finite number above 0"),
        ({"n_routed_expert": 10}, "unknown key, found 10, wanted it removed, or n_routed_experts"),
        ({"compress_ratios": "abc"}, "text_config.compress_ratios: found 'abc'"),
    ],
)
def test_a_configuration_s_slips_are_told_at_once(
    keys: dict[str, Any], message: str, tmp_path: Path
) -> None:
    check_refused(("layout", changed(tmp_path, **keys)), message)


def test_what_is_no_file_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.json")
    (tmp_path / "number.json").write_text('{"text_config": 5}')
    check_refused(("layout", tmp_path / "pipe.json"), "pipe.json: found no regular file")
    check_refused(("layout", tmp_path / "number.json"), "text_config: found 5, wanted an object")


@pytest.mark.parametrize("env", [{}, {"FORCE_COLOR": "1", "COLUMNS": "30"}, {"COLUMNS": "20"}])
def test_no_figure_is_cut_whatever_the_width(toy: Path, env: dict[str, str]) -> None:
    """Piped, in a terminal of 30 columns, piped with a narrow one behind."""
    result = CliRunner().invoke(app, ["model", "inspect", str(toy)], env=env)
    text = re.sub(r"\x1b\[[0-9;]*m", "", result.stdout)
    lines = text.splitlines()
    facts = run_json("inspect", toy)
    assert f"tensors_sha256 {facts['tensors_sha256']}" in lines
    assert any(line.startswith("a role loads: full ") and "vision" in line for line in lines)
    for part, total in facts["parts"].items():
        (line,) = [line for line in lines if line.startswith(f"│ {part.replace('_', ' ')} ")]
        assert all(f" {value:,} " in line for value in total.values())
    wide = CliRunner().invoke(app, ["layout", "flash"], env=env).stdout
    text = re.sub(r"\x1b\[[0-9;]*m", "", wide)
    assert "113,920 B" in text and "…" not in text
    assert text.count("reuse") == 30


HEAVY = ("torch", "ray", "numpy", "tokenizers", "redis", "yaml", "asyncio", "prometheus_client")


@pytest.mark.parametrize(
    "words",
    [["--help"], ["model", "--help"], ["model", "inspect", "--help"], ["layout", "--help"]],
    ids=" ".join,
)
def test_help_imports_nothing_heavy(words: list[str]) -> None:
    code = (
        "import sys\nfrom headrace.cluster.cli import main\n"
        f"sys.argv = ['headrace', *{words!r}]\n"
        "try:\n    main()\nexcept SystemExit as end:\n    assert not end.code\n"
        f"print('loaded', sorted(set({HEAVY!r}) & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "loaded []"
    assert "Usage: headrace" in done.stdout


@pytest.mark.parametrize(
    "words",
    [
        ["layout", "flash", "--memory", "141GB"],
        ["layout", "v4-flash", "--json"],
        ["layout", str(resources.files("headrace.configs") / "models" / "demo")],
        ["store", "--help"],
        ["store", "stat"],
        ["status"],
        ["version"],
    ],
    ids=" ".join,
)
def test_what_needs_no_torch_does_not_import_it(words: list[str], tmp_path: Path) -> None:
    """`store stat` and `status` find no cluster here and say so."""
    code = (
        "import sys\nfrom headrace.cluster.cli import main\n"
        f"sys.argv = ['headrace', *{words!r}]\n"
        "try:\n    main()\nexcept SystemExit as end:\n    print(end.code or 0)\n"
        "print('loaded', sorted({'torch', 'ray', 'tokenizers'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env=os.environ | {"HEADRACE_HOME": str(tmp_path)},
    )
    code_, loaded = done.stdout.splitlines()[-2:]
    assert loaded == "loaded []"
    assert code_ == {"stat": "2", "status": "1"}.get(words[-1], "0")
    assert words[:2] != ["layout", "flash"] or "113,920" in done.stdout


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
    assert all(command in run("--help")[0] for command in ("inspect", "convert", "random"))
    for command in ("layout", "inspect", "convert", "random"):
        shown = run(command, "--help")[0]
        options = [line.split("--")[1] for line in shown.splitlines() if "│ --" in line]
        assert options
        assert all(len(line.split()) > 2 for line in options), options


def test_sizes_are_read_by_their_units() -> None:
    sizes = {"5B": 5, "141GB": 141 * 10**9, "80 GiB": 80 << 30, "1.5kB": 1500, "2KiB": 2048}
    assert {text: parse_bytes(text, "--memory") for text in sizes} == sizes
    for text in ("", "5", "141", "GB", "1gb", "-3GB", "1e9", "1 PB"):
        with pytest.raises(ConfigError, match="--memory: found"):
            parse_bytes(text, "--memory")
