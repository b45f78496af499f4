"""What `headrace model inspect|convert|random` and `headrace layout` do; their options are declared
in the cluster room, which must not load torch to tell of them.

Every function prints its result, a table or JSON, on standard output and progress on standard
error, and raises `ConfigError` or `CheckpointError` for what it refuses, before it writes anything.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.markup import escape
from rich.table import Table
from tokenizers import Tokenizer

from headrace.core.deployment import MAX_SEED
from headrace.model.checkpoint import (
    Checkpoint,
    CheckpointError,
    Part,
    Quantisation,
    ReleaseConfig,
    Selection,
    released_quantisation,
    tensor_table,
    tensors_digest,
    totals_by_part,
    write_random,
)
from headrace.model.checkpoint import convert as convert_checkpoint
from headrace.model.checkpoint.holdings import shown
from headrace.model.checkpoint.load import TOKENIZER_NAME
from headrace.model.checkpoint.progress import progress_bar
from headrace.model.checkpoint.synthetic import stored_bytes
from headrace.model.checkpoint.writer import DIGEST_KEY, companions_of
from headrace.model.config import ModelConfig
from headrace.model.errors import ConfigError
from headrace.model.layout_command import is_there, parse_bytes, print_json, release_of, show_table
from headrace.model.named import package_tokenizer
from headrace.model.report_views import show_bytes


@dataclass(frozen=True, slots=True)
class Form:
    """How a checkpoint is to be written, as the options say it; checked where it is used."""

    parts: str = "full"
    max_shard: str = "10GiB"
    prefix: bool = False
    block: int | None = None  # None: as released
    experts: str = "fp4"
    bf16: bool = False

    def selection(self) -> Selection:
        if self.parts not in tuple(Selection):
            wanted = ", ".join(Selection)
            raise ConfigError(f"--parts: found {self.parts!r:.60}, wanted one of {wanted}")
        return Selection(self.parts)

    def shard_bytes(self) -> int:
        if (n_bytes := parse_bytes(self.max_shard, "--max-shard")) < 1:
            raise ConfigError(f"--max-shard: found {self.max_shard!r}, wanted at least 1 byte")
        return n_bytes

    def release(self, config: ModelConfig) -> ReleaseConfig:
        side = released_quantisation(config).weight_block[0] if self.block is None else self.block
        stored = None if self.bf16 else Quantisation((side, side), self.experts)
        return ReleaseConfig(config, stored)


def inspect(folder: Path, values: bool, verify: bool, json_: bool) -> None:
    """Check a checkpoint and say what it holds."""
    with Checkpoint.open(_folder(folder), None) as checkpoint:
        if values:
            with progress_bar("decoding", enabled=not json_) as report:
                for _ in checkpoint.stream(on_progress=report):
                    pass
        digest = checkpoint.index.metadata.get(DIGEST_KEY)
        if verify:
            with progress_bar("reading", enabled=not json_) as report:
                found = tensors_digest(checkpoint, report)
            if digest is not None and digest != found:
                raise CheckpointError(f"{DIGEST_KEY}: found {found}, wanted {digest}")
            digest = found
        facts = _facts(checkpoint, digest if isinstance(digest, str) else None)
        _print_facts(folder, facts, json_)


def convert(source: Path, target: Path, form: Form, json_: bool) -> None:
    """Rewrite a checkpoint in another form."""
    parts = form.selection()
    with Checkpoint.open(_folder(source), parts) as checkpoint:
        release = form.release(checkpoint.release.model)
        shard_bytes = form.shard_bytes()
        _check_target(target, stored_bytes(release, parts))
        with progress_bar("writing", enabled=not json_) as report:
            digest = convert_checkpoint(
                checkpoint,
                target,
                release,
                max_shard_bytes=shard_bytes,
                prefix="model." if form.prefix else "",
                companions=companions_of(source),
                on_progress=report,
            )
    _written(target, digest, json_)


def random(
    name: str, target: Path, seed: int, form: Form, tokenizer: Path | None, json_: bool
) -> None:
    """Write a checkpoint of random weights."""
    if not 0 <= seed <= MAX_SEED:
        raise ConfigError(f"--seed: found {seed}, wanted in 0..{MAX_SEED}")
    parts, model = form.selection(), release_of(name).model
    release, companions = form.release(model), _tokenizer(tokenizer, model.vocab_size)
    shard_bytes = form.shard_bytes()
    _check_target(target, stored_bytes(release, parts))
    with progress_bar("writing", enabled=not json_) as report:
        digest = write_random(
            target,
            release,
            seed,
            selection=parts,
            max_shard_bytes=shard_bytes,
            prefix="model." if form.prefix else "",
            companions=companions,
            on_progress=report,
        )
    _written(target, digest, json_)


# ---- what the arguments mean ---------------------------------------------------------------


def _folder(path: Path) -> Path:
    if not is_there(path) or not path.is_dir():
        raise ConfigError(f"{str(path)[-200:]}: found no folder, wanted that of a checkpoint")
    return path


def _tokenizer(path: Path | None, vocab_size: int) -> dict[str, bytes]:
    """The file that goes along: the one named, or the package's of that size, or none."""
    if path is None:
        try:
            return {TOKENIZER_NAME: package_tokenizer(vocab_size).to_str().encode()}
        except ConfigError:  # none of that size: the checkpoint goes without
            return {}
    if not is_there(path) or not path.is_file():
        raise ConfigError(f"--tokenizer: {str(path)[-200:]} is no file, wanted a tokenizer.json")
    raw = path.read_bytes()
    try:
        size = Tokenizer.from_buffer(raw).get_vocab_size()
    except Exception as error:  # the library raises no other
        raise ConfigError(
            f"--tokenizer: {path.name} cannot be read as a tokenizer ({str(error)[:100]})"
        ) from None
    if size > vocab_size:
        raise ConfigError(
            f"--tokenizer: found {size} ids in {path.name}, wanted at most the vocabulary's"
            f" {vocab_size}"
        )
    return {TOKENIZER_NAME: raw}


def _check_target(folder: Path, n_bytes: int) -> None:
    """Refuse before any work: a folder that exists, a place that cannot be, a disk too full."""
    try:
        found = folder.exists() or folder.is_symlink()
        place = folder.absolute().parent
        while not place.exists():
            place = place.parent
    except (OSError, ValueError):
        raise ConfigError(f"{str(folder)[:80]!r}: no folder can have that name") from None
    if found:
        raise ConfigError(f"{folder}: exists already; name a new folder or remove it")
    if not place.is_dir():
        raise ConfigError(f"{folder}: cannot be made, {place} is no folder")
    free = shutil.disk_usage(place).free
    if n_bytes > free:
        raise ConfigError(
            f"{folder.name}: needs {show_bytes(n_bytes)} of disk, {show_bytes(free)} are free"
        )


# ---- what is printed -----------------------------------------------------------------------


def _facts(checkpoint: Checkpoint, digest: str | None) -> dict[str, Any]:
    parts = totals_by_part(checkpoint.entries)
    quantisation = checkpoint.release.quantisation
    table = tensor_table(checkpoint.release.model, quantisation)
    return {
        "shards": len(checkpoint.shards),
        "tensors": sum(total.n_tensors for total in parts.values()),
        "parameters": sum(total.n_parameters for total in parts.values()),
        "bytes": checkpoint.total_bytes,
        "read_bytes": checkpoint.meter.read_bytes,
        "weight_block": None if quantisation is None else list(quantisation.weight_block),
        "expert_dtype": None if quantisation is None else quantisation.expert_dtype,
        DIGEST_KEY: digest,
        "parts": {
            part.value: {
                "tensors": total.n_tensors,
                "parameters": total.n_parameters,
                "bytes": total.n_bytes,
            }
            for part, total in parts.items()
        },
        "parts_lacking": [p.value for p in totals_by_part(table) if p not in parts],
        "selections": {
            selection.value: sum(parts[p].n_bytes for p in selection.parts if p in parts)
            for selection in Selection
        },
    }


def _print_facts(folder: Path, facts: dict[str, Any], json_: bool) -> None:
    if json_:
        print_json(facts)
        return
    block, experts = facts["weight_block"], facts["expert_dtype"]
    kind = "BF16" if block is None else f"FP8 {block[0]}x{block[1]}, experts {experts.upper()}"
    shards = "1 shard" if facts["shards"] == 1 else f"{facts['shards']} shards"
    table = Table(title=f"{escape(folder.name)}: {shards}, {kind}")
    table.add_column("part")
    for head in ("tensors", "parameters", "bytes"):
        table.add_column(head, justify="right")
    for part, total in facts["parts"].items():
        table.add_row(part.replace("_", " "), *(f"{value:,}" for value in total.values()))
    table.add_section()
    table.add_row("all", *(f"{facts[key]:,}" for key in ("tensors", "parameters", "bytes")))
    show_table(table)
    lacking = {Part(part) for part in facts["parts_lacking"]}
    complete = [s for s in Selection if not s.parts & lacking and facts["selections"][s.value]]
    loads = ", ".join(f"{s.value} {show_bytes(facts['selections'][s.value])}" for s in complete)
    print(f"a role loads: {loads or 'nothing of it'}")
    if lacking:
        print(f"lacks {shown(lacking)}")
    print(f"{DIGEST_KEY} {facts[DIGEST_KEY] or 'not recorded'}")


def _written(folder: Path, digest: str, json_: bool) -> None:
    with Checkpoint.open(folder, None) as checkpoint:  # what was written reads
        _print_facts(folder, _facts(checkpoint, digest), json_)
