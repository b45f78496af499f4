"""The training mix as packed batches: which documents, how they stand in rows, what counts.

A batch is decided by (seed, its number), whoever makes it; workers share the numbers out.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from random import Random

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import IterableDataset, get_worker_info

from headrace.model.config import ModelConfig
from headrace.model.engram_hash import hashes_of, map_history
from headrace.model.errors import ConfigError
from headrace.model.named import package_tokenizer
from headrace.model.token_map import build_token_map
from headrace.model.training import recall, scenes, stories, talk
from headrace.model.training.chat import BOS, Document, Encoder, Piece
from headrace.model.training.pictures import picture_talk
from headrace.model.training.recall import Task

# part -> (share of the tokens, weight of its answers)
PARTS = {
    "prose": (0.23, 1.0),
    "stories": (0.13, 1.0),
    "chat": (0.12, 1.0),
    "arithmetic": (0.06, 2.0),
    "json": (0.05, 1.5),
    "tools": (0.04, 1.0),
    "recall": (0.24, 2.0),
    "facts": (0.04, 1.5),
    "pictures": (0.09, 2.0),
}
PART_NAMES = tuple(PARTS)
_LEAST_DOCUMENT = 48
_LEAST_PICTURE = 140  # tokens that every picture of a row has for itself and its questions
# Texts begin at multiples: groups of two tokens and candidate blocks of eight entries are theirs.
ALIGN = 8


class Corpus:
    """The prose stream; the end of every source is held out. `None` as folder: no prose."""

    def __init__(self, folder: Path | None) -> None:
        self.ids = np.zeros(0, dtype="<u2")
        self.train: list[tuple[int, int]] = []
        self.held_out: dict[str, tuple[int, int]] = {}
        self.bytes_a_token: dict[str, float] = {}
        if folder is None:
            return
        self.ids = np.fromfile(folder / "corpus.bin", dtype="<u2")
        for source in json.loads((folder / "corpus.json").read_text("utf-8"))["sources"]:
            end = source["start"] + source["n_tokens"]
            border = end - source["held_out_tokens"]
            self.train.append((source["start"], border))
            self.held_out[source["name"]] = (border, end)
            self.bytes_a_token[source["name"]] = source["n_bytes"] / source["n_tokens"]
        lengths = np.array([hi - lo for lo, hi in self.train], dtype=float)
        self._ends = np.cumsum(lengths / lengths.sum())

    def cut(self, rng: Random, n_tokens: int) -> list[int]:
        """A stretch of a source, sources by their length."""
        lo, hi = self.train[int(np.searchsorted(self._ends, rng.random()))]
        start = rng.randrange(lo, max(lo + 1, hi - n_tokens))
        return self.ids[start : start + n_tokens].astype(np.int64).tolist()


@dataclass
class Row:
    """One packed row, all [T]; `targets` follow `ids` by one."""

    ids: NDArray[np.int64]
    weights: NDArray[np.float32]
    part: NDArray[np.int64]
    document: NDArray[np.int64]
    positions: NDArray[np.int64]
    pictures: list[NDArray[np.uint8]]
    starts: list[int]  # of the pictures' spans


class Mixer(IterableDataset[dict[str, torch.Tensor]]):
    """Endless batches of `batch` rows of `length` tokens with `pictures` pictures a row."""

    def __init__(
        self,
        config: ModelConfig,
        corpus: Corpus,
        *,
        seed: int,
        batch: int,
        length: int,
        pictures: int = 2,
        first: int = 0,
        shares: Mapping[str, float] | None = None,
        long_recall: float = 0.0,
    ) -> None:
        """`shares` replaces parts' shares of the tokens, as weights beside the others' own;
        `long_recall` is the share of the rows without pictures that begin with a recall task of
        half a row or more. `pictures` is a mean: half of the rows have all of them, so that the
        others have room for long texts. Raises `ConfigError` for a part that is none or a share
        that is no such number."""
        self.config, self.corpus = config, corpus
        self.shares = {name: share for name, (share, _) in PARTS.items()} | dict(shares or {})
        others = [name for name in PART_NAMES if name != "pictures"]
        if unknown := sorted(set(shares or {}) - set(others)):
            raise ConfigError(
                f"mix: found {unknown[0]!r:.40}, wanted parts of {', '.join(others)} (pictures have"
                " a count, --pictures)"
            )
        if bad := [n for n, share in self.shares.items() if not 0 < share < math.inf]:
            raise ConfigError(f"mix: found {bad[0]}={self.shares[bad[0]]}, wanted more than 0")
        if not 0 <= long_recall <= 1:
            raise ConfigError(f"long-recall: found {long_recall}, wanted in 0..1")
        self.long_recall = long_recall
        self.seed, self.batch, self.length, self.first = seed, batch, length, first
        self.pictures = pictures
        tokenizer = package_tokenizer(config.vocab_size)
        self.encoder = Encoder(tokenizer, config.image_token_id, span_tokens(config))
        self.facts = talk.Facts(tokenizer)
        self.token_map = build_token_map(tokenizer).ids
        self.hashes = hashes_of(config)
        self._makers: dict[str, Callable[[Random, int], Document]] = {
            "prose": self._prose,
            "stories": self._story,
            "chat": self._chat,
            "arithmetic": lambda r, n: recall.arithmetic(r, r.randint(4, 12)).document(),
            "json": lambda r, n: talk.json_answer(r).document(),
            "tools": lambda r, n: talk.tool_call(r).document(),
            "recall": self._recall,
            "facts": lambda r, n: self.facts.task(r, r.randint(4, 12)).document(),
            "pictures": self._picture,
        }

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        worker = get_worker_info()
        step = worker.num_workers if worker else 1
        number = self.first + (worker.id if worker else 0)
        while True:
            yield self.make(number)
            number += step

    def make(self, number: int) -> dict[str, torch.Tensor]:
        """Batch `number`."""
        rng = Random(f"{self.seed}:{number}:{self.length}")
        spent = {name: rng.random() * 300 for name in PARTS}
        rows = []
        for n in self._pictures_of_rows():
            begins_long = n == 0 and rng.random() < self.long_recall
            rows.append(self._row(rng, spent, n, begins_long))
        return self.collate(rows, rng)

    def _pictures_of_rows(self) -> list[int]:
        """How many pictures each row has; the sum does not change from batch to batch."""
        total, rows = self.pictures * self.batch, -(-self.batch // 2)
        some = [total // rows + (row < total % rows) for row in range(rows)]
        return some + [0] * (self.batch - rows)

    # ---- documents -------------------------------------------------------------------------

    def fill(self, rng: Random, n_tokens: int) -> list[int]:
        """Neutral words between what matters: prose, or drawn ids where there is no corpus."""
        if len(self.corpus.ids):
            return self.corpus.cut(rng, n_tokens)
        text = " ".join(rng.choice(words_of_filler) for _ in range(n_tokens))
        return self.encoder.ids(text)[:n_tokens]

    def filler(self, rng: Random, n_tokens: int) -> list[int]:
        """What stands between codes: prose, sometimes a short piece of it again and again."""
        if n_tokens < 100 or rng.random() < 0.7:
            return self.fill(rng, n_tokens)
        piece = self.fill(rng, rng.randint(20, 90))
        return (piece * (n_tokens // len(piece) + 1))[:n_tokens]

    def _prose(self, rng: Random, room: int) -> Document:
        n = min(room, rng.randint(200, 1200))
        return Document([Piece(BOS, 0.0), Piece(self.fill(rng, max(1, n - 1)), 1.0)])

    def _story(self, rng: Random, room: int) -> Document:
        kind = rng.random()
        if kind < 0.3:
            return Document([Piece(BOS, 0.0), Piece(stories.tell(rng).text, 1.0)])
        return (talk.story_on_request(rng) if kind < 0.8 else talk.story_to_read(rng)).document()

    def _chat(self, rng: Random, room: int) -> Document:
        makers = (talk.hello, talk.small_talk, talk.talk_with_story, talk.story_to_read)
        return rng.choices(makers, (0.12, 0.33, 0.33, 0.22))[0](rng).document()

    def _recall(self, rng: Random, room: int) -> Document:
        return self.recall_task(rng, room).document()

    def recall_task(self, rng: Random, room: int, is_long: bool = False) -> Task:
        """One of the recall tasks, of at most about `room` tokens: short ones often, or of half
        the room at least."""
        most = max(60, room - 60)
        size = int(math.exp(rng.uniform(math.log(40), math.log(most))))
        if is_long:
            size = rng.randint(most // 2, most)
        kind = rng.random()
        if kind < 0.30:
            gaps = self._gaps(rng, size)
            return recall.far(rng, self.filler, gaps, rng.randint(1, len(gaps)))
        if kind < 0.42 and not is_long:
            return recall.near(rng, min(size // 2, rng.randint(3, 60)))
        if kind < 0.60:
            asked = rng.randint(1, max(6, size // 150))
            pairs = max(2, min((size - 26 * asked) // 10, 1_000))
            return recall.table(rng, pairs, min(pairs, asked))
        if kind < 0.74:
            names = rng.randint(1, max(1, min(12, size // 20)))
            asked = rng.randint(1, names)
            return recall.overwrite(rng, names, max(names, (size - 26 * asked) // 12), asked)
        if kind < 0.84:
            rounds = rng.randint(2, max(2, min(12, size // 80)))
            names = rng.randint(1, max(1, min(12, size // 40)))
            settings = max(1, (size - 26 * rounds) // 12)
            return recall.overwrite_in_turns(rng, names, settings, rounds)
        if kind < 0.95:
            turns = rng.randint(2, 6)
            return recall.growth(rng, self.filler, turns, max(1, size // turns))
        return recall.unknown(rng, self.filler, self._gaps(rng, size))

    @staticmethod
    def _gaps(rng: Random, size: int) -> list[int]:
        """Tokens of filler after each of one to eight codes, in a text of about `size`."""
        n = rng.randint(1, max(1, min(8, size // 30)))
        borders = sorted(rng.randint(0, size) for _ in range(n))
        gaps = [b - a for a, b in zip(borders, [*borders[1:], size], strict=True)]
        return [max(0, gap - 48) for gap in gaps]  # a code, and its question later

    def _picture(self, rng: Random, room: int) -> Document:
        """As many questions and as much other talk as `room` holds, one question at least."""
        made = picture_talk(rng)
        while True:
            document = made.document()
            if len(made.turns) == 1 or len(self.encoder.encode(document)[0]) <= room:
                return document
            made = made.shorter()

    # ---- rows ------------------------------------------------------------------------------

    def _row(self, rng: Random, spent: dict[str, float], pictures: int, begins_long: bool) -> Row:
        t, makers = self.length, self._makers
        row = Row(
            np.full(t, self.config.pad_token_id, np.int64),
            np.zeros(t, np.float32),
            np.zeros(t, np.int64),
            np.zeros(t, np.int64),
            np.zeros(t, np.int64),
            [],
            [],
        )
        at, number = 0, 0
        while at < t:
            room, number = t - at, number + 1
            name = "pictures" if pictures else self._due(spent)
            if room < _LEAST_DOCUMENT:
                name = "prose"
            if begins_long and number == 1:
                name = "recall"
                document = self.recall_task(rng, room, is_long=True).document()
            else:
                own = room - (pictures - 1) * _LEAST_PICTURE if name == "pictures" else room
                document = makers[name](rng, own)
            ids, weights = self.encoder.encode(document)
            if len(ids) > room:  # prose fills what is left exactly
                if name == "pictures":
                    raise ValueError(f"length: found {t}, too short for its pictures")
                name = "prose"
                ids, weights = self.encoder.encode(self._prose(rng, room))
            pictures -= name == "pictures"
            spent[name] += len(ids)
            at = self._place(row, at, number, name, ids[:room], weights[:room], document)
        return row

    def _due(self, spent: dict[str, float]) -> str:
        """The part that is furthest behind its share; pictures have their own count."""
        others = [name for name in PART_NAMES if name != "pictures"]
        return min(others, key=lambda name: spent[name] / self.shares[name])

    def _place(
        self,
        row: Row,
        at: int,
        number: int,
        name: str,
        ids: NDArray[np.int64],
        weights: NDArray[np.float32],
        document: Document,
    ) -> int:
        n = len(ids)
        end = min(at + n + -n % ALIGN, self.length)
        row.ids[at : at + n] = ids
        row.weights[at : at + n] = weights * PARTS[name][1]
        row.part[at:end] = PART_NAMES.index(name)
        row.document[at:end] = number
        row.positions[at:end] = np.arange(end - at)
        if name == "pictures":
            row.pictures += document.pictures
            row.starts.append(at + int(np.argmax(ids == self.config.image_token_id)))
        return end

    def collate(self, rows: list[Row], rng: Random) -> dict[str, torch.Tensor]:
        """Tensors by name: those of `Texts`, and `targets`, `weights`, `part` of each column."""
        ids = np.stack([r.ids for r in rows])
        document = np.stack([r.document for r in rows])
        positions = np.stack([r.positions for r in rows])
        same = np.zeros_like(ids, bool)
        same[:, :-1] = document[:, 1:] == document[:, :-1]
        weights = np.stack([r.weights for r in rows])
        image = ids == self.config.image_token_id
        span = np.arange(self.encoder.span_tokens)
        places = [
            row * self.length + start + span for row, r in enumerate(rows) for start in r.starts
        ]
        pictures = [p for r in rows for p in r.pictures]
        arrays = {
            "ids": ids.astype(np.int32),
            "targets": np.roll(ids, -1, axis=1).astype(np.int32),
            "weights": np.where(same, np.roll(weights, -1, axis=1), 0).astype(np.float32),
            "part": np.stack([r.part for r in rows]).astype(np.int32),
            "positions": positions.astype(np.int32),
            "document": document.astype(np.int32),
            "history": (document * 4096 + self._cuts(rng, len(rows))).astype(np.int32),
            "image": image,
            "engram_rows": self.engram_rows(ids, positions, image),
            "pictures": np.stack(pictures) if pictures else np.zeros((0, 8, 8, 3), np.uint8),
            "picture_places": np.array(places, np.int64).reshape(-1, len(span)),
        }
        return {name: torch.from_numpy(np.ascontiguousarray(a)) for name, a in arrays.items()}

    def _cuts(self, rng: Random, n_rows: int) -> NDArray[np.int64]:
        """Cuts of the decoder's history before each column, in every second row."""
        out = np.zeros((n_rows, self.length), np.int64)
        for row in range(n_rows):
            at = rng.randint(0, 800) if rng.random() < 0.5 else self.length
            while at < self.length:
                out[row, at:] += 1
                at += rng.randint(90, 800)
        return out

    def engram_rows(
        self, ids: NDArray[np.int64], positions: NDArray[np.int64], image: NDArray[np.bool_]
    ) -> NDArray[np.int32]:
        """int32 [engram layers, B, T, rows a token]; n-grams end where their text begins."""
        flat, place, flags = ids.ravel(), positions.ravel(), image.ravel()
        grams = self.config.engram_max_ngram_size
        back = np.stack([np.where(place >= k, np.roll(flat, k), -1) for k in range(grams)], 1)
        seen = np.stack([(place >= k) & np.roll(flags, k) for k in range(grams)], 1)
        mapped = map_history(back, seen, self.token_map, self.config.engram_pad_token_id)
        rows = [h.rows(mapped).reshape(*ids.shape, -1) for h in self.hashes]
        return np.stack(rows).astype(np.int32)


words_of_filler = ("the", "wind", "was", "calm", "and", "a", "road", "went", "on", "to", "sea")


def span_tokens(config: ModelConfig) -> int:
    """Positions of one drawn picture: cells, newlines, start and end."""
    if config.vision is None:
        return 1
    side = scenes.SIZE // config.vision.patch_size
    cells = -(-side // config.vision.downsample)
    return cells * (cells + 1) + 2
