"""Makes configs/tokenizer/tokenizer-{4096,1024}.json and configs/texts/austen-excerpt.txt.

A byte-level BPE with single digits and the special-token names of DeepSeek's V4.1 tokenizer, so
that chat templates and stream parsers are the ones of the release while the embedding of a tiny
model stays tiny. Needs `tokenizers` and an x86-64 Debian 12 (the Bible's text is printed by its own
program); the same packages give byte-identical files.

    cd "$(mktemp -d)" && apt-get update
    apt-get download bible-kjv bible-kjv-text r-cran-janeaustenr python3.11-doc \
        postgresql-doc-15 wordnet-base dict-jargon
    for deb in *.deb; do dpkg -x "$deb" packages; done
    python bench/make_tokenizer.py packages      # from the repository root

Sources, all of a licence that asks for no more than notice (NOTICE has the wording):

    bible-kjv-text      King James Bible; copyright expired, says the package
    r-cran-janeaustenr  Jane Austen's six novels; text in the public domain, package MIT
    python3.11-doc      Python documentation, reStructuredText; PSF License 2
    postgresql-doc-15   PostgreSQL manual; PostgreSQL License
    wordnet-base        glosses of WordNet 3.0; WordNet License
    dict-jargon         Jargon File 4.4.7; public domain

At most 3 million characters of each source is used, so that no source owns the vocabulary.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from headrace.model.training.corpus import (
    austen_novels,
    bible,
    jargon_file,
    postgresql_manual,
    python_docs,
    wordnet_glosses,
)

SOURCE_CHARACTERS = 3_000_000
EXCERPT_BYTES = 60_000

# (name, is it "special" in the release, i.e. left out by a decoder that skips special tokens).
# The first three ids are the release's own; the rest stand in the release's order.
SPECIAL_TOKENS = [
    ("<｜begin▁of▁sentence｜>", True),
    ("<｜end▁of▁sentence｜>", True),
    ("<｜▁pad▁｜>", True),
    ("<｜fim▁hole｜>", False),
    ("<｜fim▁begin｜>", False),
    ("<｜fim▁end｜>", False),
    ("<｜User｜>", False),
    ("<｜Assistant｜>", False),
    ("<｜System｜>", False),
    ("<|EOT|>", False),
    ("<｜tool▁calls▁begin｜>", False),
    ("<｜tool▁calls▁end｜>", False),
    ("<｜tool▁call▁begin｜>", False),
    ("<｜tool▁call▁end｜>", False),
    ("<｜tool▁outputs▁begin｜>", False),
    ("<｜tool▁outputs▁end｜>", False),
    ("<｜tool▁output▁begin｜>", False),
    ("<｜tool▁output▁end｜>", False),
    ("<｜tool▁sep｜>", False),
    ("<think>", False),
    ("</think>", False),
    ("｜DSML｜", False),
    ("<｜latest_reminder｜>", False),
    ("<｜/polygon｜>", True),
    ("<｜polygon｜>", True),
    ("<｜/point｜>", True),
    ("<｜point｜>", True),
    ("<｜/box｜>", True),
    ("<｜box｜>", True),
    ("<｜/ref｜>", True),
    ("<｜ref｜>", True),
]
# Fed to the drafter for a token not drafted yet; the release takes this place holder, id 128799.
NOISE_TOKEN = ("<｜place▁holder▁no▁799｜>", True)
IMAGE_TOKEN = ("<｜image｜>", True)
# vocabulary size -> (noise id, image id); dspark_noise_token_id and image_token_id of T1 and T2.
FIXED_IDS = {4096: (4000, 4001), 1024: (1000, 1001)}


def spread(text: str, limit: int) -> Iterator[str]:
    """Yields pieces of about 4 kB evenly spread over the text, `limit` characters in all."""
    pieces = [text[i : i + 4096] for i in range(0, len(text), 4096)]
    wanted = max(1, limit // 4096)
    step = max(1.0, len(pieces) / wanted)
    for i in range(min(wanted, len(pieces))):
        yield pieces[int(i * step)]


def split_rule() -> pre_tokenizers.PreTokenizer:
    """Digits one by one, then words, punctuation and blanks; no token crosses such a border."""
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )


def train(texts: list[str], size: int) -> dict[str, Any]:
    """Returns the content of a tokenizer.json with exactly `size` ids.

    Special tokens stand in the model's vocabulary under their own ids, where no merge leads, since
    a loader gives an added token the id that the vocabulary has for it and else the next free one.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = split_rule()
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    special = dict(enumerate(SPECIAL_TOKENS))
    noise_id, image_id = FIXED_IDS[size]
    special |= {noise_id: NOISE_TOKEN, image_id: IMAGE_TOKEN}
    trainer = trainers.BpeTrainer(
        vocab_size=size - len(special),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    content: dict[str, Any] = json.loads(tokenizer.to_str())
    learnt = sorted(content["model"]["vocab"], key=content["model"]["vocab"].__getitem__)
    free = (i for i in range(size) if i not in special)
    vocabulary = dict(zip(learnt, free, strict=True))
    vocabulary |= {name: i for i, (name, _) in special.items()}
    content["model"]["vocab"] = dict(sorted(vocabulary.items(), key=lambda item: item[1]))
    common = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    content["added_tokens"] = [
        {"id": i, "content": name, **common, "special": flag}
        for i, (name, flag) in sorted(special.items())
    ]
    return content


def excerpt(novels: list[str]) -> str:
    """The opening of Pride and Prejudice, cut after a paragraph."""
    novel = next(text for text in novels if text.startswith("PRIDE AND PREJUDICE"))
    return novel[: novel.rindex("\n\n", 0, EXCERPT_BYTES)].strip() + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description="train the tokenizers of the tiny models")
    parser.add_argument("packages", type=Path, help="folder with the unpacked Debian packages")
    parser.add_argument("--configs", type=Path, default=Path("configs"))
    arguments = parser.parse_args()
    packages = arguments.packages.resolve()
    novels = list(austen_novels(packages))
    sources = {
        "King James Bible": bible(packages),
        "Jane Austen": "\n".join(novels),
        "Python documentation": python_docs(packages),
        "PostgreSQL manual": postgresql_manual(packages),
        "WordNet glosses": wordnet_glosses(packages),
        "Jargon File": jargon_file(packages),
    }
    texts = []
    for name, text in sources.items():
        pieces = list(spread(text, SOURCE_CHARACTERS))
        texts += pieces
        print(f"{name}: {len(text):,} characters, {sum(map(len, pieces)):,} used")
    for size in FIXED_IDS:
        path = arguments.configs / "tokenizer" / f"tokenizer-{size}.json"
        content = json.dumps(train(texts, size), ensure_ascii=False, indent=1)
        path.write_text(content + "\n", "utf-8")
        tokenizer = Tokenizer.from_file(str(path))
        rates = {
            name: len(text[:200_000].encode()) / len(tokenizer.encode(text[:200_000]).ids)
            for name, text in sources.items()
        }
        print(path, {name: f"{rate:.2f} B/token" for name, rate in rates.items()})
    (arguments.configs / "texts" / "austen-excerpt.txt").write_text(excerpt(novels), "utf-8")


if __name__ == "__main__":
    main()
