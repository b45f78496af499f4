"""Text and ids: plain text never gives a special token, pieces of output join to the whole."""

from __future__ import annotations

import json

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from headrace.core.errors import ConfigError
from headrace.core.request import FinishReason
from headrace.router.protocol import Protocols, Usage
from headrace.router.tokens import StopScanner, TextStream, Vocabulary

V = Vocabulary("tokenizer-4096")
ORACLE = tokenizers.Tokenizer.from_str(V.text)


@given(st.lists(st.integers(0, 4095), max_size=60), st.integers(1, 7))
def test_pieces_join_to_what_the_library_decodes(ids: list[int], step: int) -> None:
    stream = TextStream(V)
    text = "".join(stream.push(ids[i : i + step]) for i in range(0, len(ids), step))
    assert text + stream.finish() == ORACLE.decode(ids, skip_special_tokens=True)


@given(st.text(max_size=200))
def test_encoding_keeps_every_byte(text: str) -> None:
    stream = TextStream(V)
    assert stream.push(V.encode_plain(text)) + stream.finish() == text


def test_no_added_token_comes_from_text() -> None:
    added = set(V.added.values())
    for name in V.added:
        for text in (name, f"a {name}{name} b", name[:3] + name[3:]):
            ids = V.encode_plain(text)
            assert not added & set(ids), name
            # The control: the whole file's encoder does give the token.
            assert V.added[name] in ORACLE.encode(text, add_special_tokens=False).ids


@given(
    st.text("ab\n", max_size=40),
    st.lists(st.text("ab\n", min_size=1, max_size=4), min_size=1, max_size=3),
    st.lists(st.integers(1, 5), min_size=1, max_size=10),
)
def test_stop_strings_cut_where_a_search_over_the_whole_finds_them(
    text: str, stops: list[str], cuts: list[int]
) -> None:
    scanner, shown, at, turn = StopScanner(tuple(stops)), "", 0, 0
    ends: list[int] = []
    while at < len(text) and not scanner.stopped:
        piece = text[at : at + cuts[turn % len(cuts)]]
        shown += scanner.push(piece)
        at, turn = at + len(piece), turn + 1
        ends.append(at)
    shown += "" if scanner.stopped else scanner.finish()
    # The oracle: the first piece after which any stop is complete, then its earliest beginning.
    expected = text
    for end in ends:
        found = [i for i in (text[:end].find(stop) for stop in stops) if i >= 0]
        if found:
            expected = text[: min(found)]
            break
    assert shown == expected


def test_an_unknown_tokenizer_is_refused(tmp_path) -> None:
    broken = tmp_path / "x.json"
    broken.write_text("{}")
    for name in ("no-such", "../tokenizer-4096", str(broken), str(tmp_path / "none.json")):
        with pytest.raises(ConfigError, match="tokenizer"):
            Vocabulary(name)


@pytest.mark.parametrize("size", [1, 2, 3, 6])
def test_a_chat_cut_inside_a_character_keeps_the_text_before_it(size: int) -> None:
    """Whatever pieces the tokens came in: the first bytes of a character end the answer."""
    protocols = Protocols(V)
    half = next(i for i in range(V.size) if V.token_bytes(i) == b"\xc3")
    ids = [*V.encode_plain("the river runs"), half, *V.encode_plain(" on"), half]
    chat = {"messages": [{"role": "user", "content": "go"}], "stream": False}
    speaker = protocols.chat_prompt(chat).speaker("id", "m", protocols.tokenizer, False)
    for begin in range(0, len(ids), size):
        speaker.push(ids[begin : begin + size])
    speaker.finish(FinishReason.LENGTH, Usage(1, len(ids), 0))
    said = json.loads(speaker.whole())["choices"][0]["message"]["content"]
    assert said == "the river runs\ufffd on"
