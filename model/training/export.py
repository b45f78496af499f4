"""From trained weights to the published checkpoint form: shards, index, config, tokenizer.

    python -m headrace.model.training.export --config CONFIG.json --weights FOLDER \
        --drafter FILE.safetensors --out configs/models/demo

`--weights` may be that checkpoint itself, to change its drafter alone.

Experts become MXFP4, dense matrices and Engram tables FP8, the rest stays BF16 or F32. The loss
curves of the runs go along as training.csv and drafter.csv: from the log.jsonl beside the weights
and beside the drafter, or those that the checkpoint had. `--out` is replaced as a whole.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file

from headrace.model.checkpoint import Selection, read_config, write_values
from headrace.model.errors import ConfigError
from headrace.model.named import package_tokenizer
from headrace.model.training.curves import DRAFTER, TRAINING, curves_of
from headrace.model.training.weights import (
    build_stacks,
    load_folder,
    start_weights,
    unstack,
)

NOTICE = """These weights were trained by the programs of headrace/model/training and are under
Headrace's licence (Apache-2.0). Part of what they were trained on are texts of others, which they
contain only as far as a model of 17 million parameters does:

- Jane Austen's novels: public domain by age (R package janeaustenr, MIT, Copyright 2016-2017 Julia
  Silge)
- King James Bible: copyright expired (Debian package bible-kjv-text; the Crown's rights in the
  United Kingdom are a separate matter)
- WordNet 3.0 glosses: WordNet 3.0 Copyright 2006 by Princeton University. All rights reserved.
  WordNet 3.0 license
- Python 3.11 documentation: Copyright (c) 2001-2023 Python Software Foundation; All Rights
  Reserved. PSF License Agreement, version 2
- PostgreSQL 15 manual: Portions Copyright (c) 1996-2026, The PostgreSQL Global Development Group;
  Portions Copyright (c) 1994, The Regents of the University of California. PostgreSQL License
- Jargon File 4.4.7: public domain
- The Devil's Dictionary: copyright expired (1911)

Everything else they were trained on was generated; docs/model-card.md has the whole account.
"""
SHARD_BYTES = 4 << 20  # so that a drafter trained anew changes a small file


def trained_tensors(
    config_file: Path, weights: Path, drafter: Path | None, seed: int = 1
) -> dict[str, torch.Tensor]:
    """All tensors of the release by name, from a training run's folder or a checkpoint's. `drafter`
    replaces the drafter's; without it and where the folder has none they are untrained."""
    release = read_config(json.loads(config_file.read_text("utf-8")))
    stacks = {p: s for p, s in build_stacks(release.model).items() if p.startswith("mtp.")}
    start = unstack(stacks, start_weights(stacks, release.model, seed))
    found = {} if drafter is None else load_file(drafter)
    trained = {name: value.float() for name, value in found.items()}
    return start | load_folder(weights) | trained


def kept_curves(weights: Path, drafter: Path | None) -> dict[str, bytes]:
    """The curves of what is exported: `weights` and `drafter` may be of different runs."""
    found: dict[str, bytes] = {}
    for folder, names in (
        (weights, (TRAINING, DRAFTER)),
        (weights if drafter is None else drafter.parent, (DRAFTER,)),
    ):
        log = folder / "log.jsonl"
        made = curves_of(log) if log.is_file() else {}
        for name in names:
            if name in made:
                found[name] = made[name].encode()
            elif (folder / name).is_file():
                found[name] = (folder / name).read_bytes()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description="write the demo checkpoint")
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument(
        "--weights", type=Path, required=True, help="a training run's --out, or a checkpoint"
    )
    parser.add_argument("--drafter", type=Path, help="a run's drafter.safetensors")
    parser.add_argument("--out", type=Path, required=True, help="replaced as a whole")
    a = parser.parse_args()
    release = read_config(json.loads(a.config.read_text("utf-8")))
    if release.quantisation is None:
        raise ConfigError("quantization_config: found nothing, wanted the release's formats")
    tensors = trained_tensors(a.config, a.weights, a.drafter)
    fresh = a.out.with_name(a.out.name + ".fresh")
    shutil.rmtree(fresh, ignore_errors=True)
    tokenizer = package_tokenizer(release.model.vocab_size).to_str(pretty=True)
    companions = {"tokenizer.json": (tokenizer + "\n").encode(), "NOTICE.txt": NOTICE.encode()}
    digest = write_values(
        fresh,
        release,
        tensors,
        selection=Selection.FULL,
        max_shard_bytes=SHARD_BYTES,
        companions=companions | kept_curves(a.weights, a.drafter),
    )
    shutil.rmtree(a.out, ignore_errors=True)
    fresh.rename(a.out)
    total = sum(path.stat().st_size for path in a.out.iterdir())
    print(f"{a.out}: {total:,} bytes, tensors {digest}")


if __name__ == "__main__":
    main()
