"""Text to token ids and back, for text that is plain: no id of a special token comes from content.

Chat prompts are rendered and encoded by the protocol library with the same file; this is what it
lacks: plain prompts of `/v1/completions`, and turning ids into text piece by piece.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterable
from importlib.resources import files
from pathlib import Path

import tokenizers

from headrace.core.chain import TokenIds, as_token_ids
from headrace.core.errors import ConfigError

OFF_LOOP_CHARS = 16_384  # about 10 ms of tokenising; more leaves the event loop


class Vocabulary:
    """A byte-level BPE tokenizer file. Immutable; safe to use from several threads.

    `text` is the file's content (for the protocol library's own tokenizer)."""

    def __init__(self, name: str) -> None:
        """Raises `ConfigError` when `name` is neither a packaged tokenizer nor a readable file."""
        self.text = _read(name)
        try:
            content = json.loads(self.text)
            added = content.pop("added_tokens", [])
            # Without its added tokens the file encodes "<｜User｜>" as the characters it is. They
            # stand in the model's vocabulary too, where no merge leads.
            plain = {**content, "added_tokens": []}
            self._plain = tokenizers.Tokenizer.from_str(json.dumps(plain))
            vocabulary = dict(content["model"]["vocab"])
        except Exception as error:  # tokenizers raises bare Exception
            raise ConfigError(
                f"tokenizer {name!r} cannot be read: {type(error).__name__}"
            ) from None
        self.added = {str(token["content"]): int(token["id"]) for token in added}
        self.special = frozenset(int(token["id"]) for token in added if token["special"])
        vocabulary |= self.added
        self.size = 1 + max(vocabulary.values())
        self._bytes: list[bytes | None] = [None] * self.size
        for token, i in vocabulary.items():
            self._bytes[i] = b"" if i in self.special else _token_bytes(token)
        added_ids = set(self.added.values())
        self._longest_bytes = max(
            len(data) for i, data in enumerate(self._bytes) if data and i not in added_ids
        )

    def encode_plain(self, text: str) -> TokenIds:
        """Ids of plain text; none of them is an added token's. O(length).

        The batch form because it alone releases the GIL: 4 MB held the event loop for 7.6 s."""
        (encoded,) = self._plain.encode_batch_fast([text], add_special_tokens=False)
        return as_token_ids(encoded.ids)

    def least_tokens(self, chars: int) -> int:
        """Tokens that a text of so many characters has at the very least: tells of a text that
        can never fit, before it is encoded."""
        return chars // self._longest_bytes

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes a token stands for: none for special tokens and ids without a token."""
        if not 0 <= token_id < self.size:
            return b""
        return self._bytes[token_id] or b""


class TextStream:
    """Ids in, text out, piece by piece; bytes of an unfinished character wait for the rest."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, ids: Iterable[int]) -> str:
        """Text that became certain with these ids."""
        return self._decoder.decode(b"".join(map(self._vocabulary.token_bytes, ids)))

    def finish(self) -> str:
        """What is left: U+FFFD for an unfinished character."""
        return self._decoder.decode(b"", final=True)


class StopScanner:
    """Cuts a text stream before the first stop string, wherever its pieces break.

    Text that may be the beginning of a stop string is held back until it is not one."""

    def __init__(self, stops: tuple[str, ...]) -> None:
        self._stops = stops
        self._held = ""
        self.stopped = False

    def push(self, text: str) -> str:
        """Text that may be shown now; nothing more after a stop was met."""
        if self.stopped or not self._stops:
            return "" if self.stopped else text
        text = self._held + text
        found = [at for at in (text.find(stop) for stop in self._stops) if at >= 0]
        if found:
            self.stopped, self._held = True, ""
            return text[: min(found)]
        keep = max(_overlap(text, stop) for stop in self._stops)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def finish(self) -> str:
        """What was held back, when the stream ends without a stop."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that begins `stop` without being all of it."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0


def _read(name: str) -> str:
    path = Path(name)
    try:
        if path.suffix == ".json":
            return path.read_text("utf-8")
        if "/" not in name and "\\" not in name:
            packaged = files("headrace.configs") / "tokenizer" / f"{name}.json"
            return packaged.read_text("utf-8")
    except (OSError, UnicodeDecodeError):
        pass
    raise ConfigError(f"tokenizer must be a packaged name or a path to a .json file, got {name!r}")


def _byte_alphabet() -> dict[str, int]:
    """The byte of each character of a byte-level vocabulary (the table of GPT-2's encoder):
    printable Latin-1 characters stand for themselves, other bytes for U+0100 upwards."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = {chr(byte): byte for byte in printable}
    others = (byte for byte in range(256) if byte not in set(printable))
    alphabet |= {chr(0x100 + i): byte for i, byte in enumerate(others)}
    return alphabet


_ALPHABET = _byte_alphabet()


def _token_bytes(token: str) -> bytes:
    values = [_ALPHABET.get(character) for character in token]
    if any(value is None for value in values):  # an added token's name is its text
        return token.encode()
    return bytes(value for value in values if value is not None)
