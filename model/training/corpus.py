"""The clean prose of the demo model's mix, out of Debian packages, as one stream of token ids.

    cd "$(mktemp -d)" && apt-get update
    apt-get download bible-kjv bible-kjv-text r-cran-janeaustenr python3.11-doc \
        postgresql-doc-15 wordnet-base dict-jargon dict-devil
    for deb in *.deb; do dpkg -x "$deb" packages; done
    python -m headrace.model.training.corpus packages OUT

Writes OUT/corpus.bin (little-endian uint16 ids) and OUT/corpus.json (a source's range of ids, its
licence, how much of its end is held out). Every source's copyright file is read and must contain
the sentence that its licence here rests on. Needs an x86-64 Debian 12 (the Bible is printed by its
own program); the same packages give the same bytes.
"""

from __future__ import annotations

import argparse
import gzip
import html.parser
import json
import re
import struct
import subprocess
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from headrace.model.errors import ConfigError
from headrace.model.named import package_tokenizer

HELD_OUT_SHARE = 0.01
_PIECE_CHARS = 1 << 16


@dataclass(frozen=True)
class Source:
    """`licence_words` must stand in the package's copyright file, blanks apart."""

    name: str
    package: str
    licence: str
    licence_words: str
    read: Callable[[Path], str]


def bible(packages: Path) -> str:
    """Prints the whole text, one verse a line with its reference in front."""
    program = packages / "usr/bin/bible"
    command = [str(program), "-p", str(packages / "usr/lib"), "-f", "Gen1:1-Rev22:21"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def austen_novels(packages: Path) -> Iterator[str]:
    """The novels as lines of text, in the package's order.

    The file is R's lazy-load format: records of a 4-byte big-endian length and a zlib stream. A
    stream is R's XDR serialisation, in which a string is the word 0x00040009 (or 0x00008009 and
    0x00000009, by encoding flags), a 4-byte length and the bytes.
    """
    data = (packages / "usr/lib/R/site-library/janeaustenr/data/Rdata.rdb").read_bytes()
    while data:
        stream = zlib.decompressobj()
        record = stream.decompress(data[4:])
        data = stream.unused_data
        lines, position = [], 0
        string = re.compile(rb"\x00[\x00-\x0f][\x00-\xff]\x09([\x00-\xff]{4})", re.DOTALL)
        while match := string.search(record, position):
            length = struct.unpack(">i", match[1])[0]
            position = match.end() + max(length, 0)
            lines.append(record[match.end() : position].decode("utf-8"))
        yield "\n".join(lines) + "\n"


def python_docs(packages: Path) -> str:
    folder = packages / "usr/share/doc/python3.11/html/_sources"
    return "\n".join(path.read_text("utf-8") for path in sorted(folder.rglob("*.rst.txt")))


class _Text(html.parser.HTMLParser):
    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.parts: list[str] = []

    def handle_data(self, data: str) -> None:
        self.parts.append(data)


def postgresql_manual(packages: Path) -> str:
    texts = []
    for path in sorted((packages / "usr/share/doc/postgresql-doc-15/html").glob("*.html")):
        parser = _Text()
        parser.feed(path.read_text("utf-8"))
        texts.append("".join(parser.parts))
    return "\n".join(texts)


def wordnet_glosses(packages: Path) -> str:
    glosses = []
    for part in ("noun", "verb", "adj", "adv"):
        lines = (packages / f"usr/share/wordnet/data.{part}").read_text("utf-8").splitlines()
        # Lines that begin with blanks are the licence at the head of the file.
        glosses += [line.split(" | ", 1)[1].strip() for line in lines if line[:1] != " "]
    return "\n".join(glosses)


def dictionary(name: str) -> Callable[[Path], str]:
    """The text of a dictd file."""

    def read(packages: Path) -> str:
        path = packages / f"usr/share/dictd/{name}.dict.dz"
        with gzip.open(path, "rt", encoding="utf-8", errors="replace") as file:
            return file.read()

    return read


jargon_file = dictionary("jargon")

SOURCES = (
    Source(
        "austen",
        "r-cran-janeaustenr",
        "novels of 1811 to 1818, public domain by age; package MIT",
        "License: MIT",
        lambda packages: "\n".join(austen_novels(packages)),
    ),
    Source(
        "bible",
        "bible-kjv-text",
        "text out of copyright, says the package (the Crown's rights in the UK apart)",
        "copyright for the King James Version text of the Bible is expired",
        bible,
    ),
    Source(
        "wordnet", "wordnet-base", "WordNet 3.0 licence", "without fee or royalty", wordnet_glosses
    ),
    Source(
        "python",
        "python3.11-doc",
        "PSF License 2",
        "PYTHON SOFTWARE FOUNDATION LICENSE VERSION 2",
        python_docs,
    ),
    Source(
        "postgresql",
        "postgresql-doc-15",
        "PostgreSQL licence",
        "without fee, and without a written agreement is hereby granted",
        postgresql_manual,
    ),
    Source("jargon", "dict-jargon", "public domain", "public domain", jargon_file),
    Source("devil", "dict-devil", "public domain", "copyright has expired", dictionary("devil")),
)


def check_licence(source: Source, packages: Path) -> None:
    """Raises `ConfigError` unless the package's copyright file says what we rely on."""
    folder = packages / "usr/share/doc" / source.package
    path = folder / "copyright"
    text = path.read_text("utf-8", errors="replace") if path.is_file() else ""
    if source.licence_words.lower() not in " ".join(text.split()).lower():
        raise ConfigError(
            f"{source.package}: its copyright file does not say {source.licence_words!r}"
        )


def encode(tokenizer: Tokenizer, text: str) -> np.ndarray:
    """Ids of plain text as uint16, cut at line ends for the tokenizer's sake."""
    pieces, start = [], 0
    while start < len(text):
        end = text.find("\n", start + _PIECE_CHARS) + 1 or len(text)
        pieces.append(text[start:end])
        start = end
    encoded = tokenizer.encode_batch_fast(pieces, add_special_tokens=False)
    return np.concatenate([np.asarray(e.ids, dtype="<u2") for e in encoded])


def main() -> None:
    parser = argparse.ArgumentParser(description="build the prose part of the training mix")
    parser.add_argument("packages", type=Path, help="folder with the unpacked Debian packages")
    parser.add_argument("out", type=Path)
    parser.add_argument("--vocabulary", type=int, default=4096)
    arguments = parser.parse_args()
    packages = arguments.packages.resolve()
    tokenizer = package_tokenizer(arguments.vocabulary)
    arguments.out.mkdir(parents=True, exist_ok=True)
    streams, facts, start = [], [], 0
    for source in SOURCES:
        check_licence(source, packages)
        text = source.read(packages)
        ids = encode(tokenizer, text)
        held = int(len(ids) * HELD_OUT_SHARE)
        facts.append(
            {
                "name": source.name,
                "package": source.package,
                "licence": source.licence,
                "start": start,
                "n_tokens": len(ids),
                "held_out_tokens": held,
                "n_bytes": len(text.encode()),
            }
        )
        streams.append(ids)
        start += len(ids)
        print(f"{source.name}: {len(text.encode()):,} bytes, {len(ids):,} tokens", flush=True)
    np.concatenate(streams).tofile(arguments.out / "corpus.bin")
    document = {"vocabulary": arguments.vocabulary, "sources": facts}
    (arguments.out / "corpus.json").write_text(json.dumps(document, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
