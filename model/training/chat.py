"""Texts in the released chat template, written as the protocol library writes them.

A document is a list of pieces; a piece says how much its tokens count in the loss. The template's
own words and the user's count little or nothing: what is learnt are the answers.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from tokenizers import Tokenizer

BOS, EOS = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"
USER, ASSISTANT, SYSTEM = "<｜User｜>", "<｜Assistant｜>", "<｜System｜>"
IMAGE = "<｜image｜>"
ANSWER = f"{ASSISTANT}</think>"  # answers without reasoning
PROMPT_WEIGHT = 0.05

_TOOLS = """

## Tools

You have access to a set of tools to help answer the user's question. You can invoke tools by \
writing a "<｜DSML｜ calls>" block like the following:

<｜DSML｜ calls>
<｜DSML｜ invoke name="$TOOL_NAME">
<｜DSML｜ parameter name="$PARAMETER_NAME" string="true|false">$PARAMETER_VALUE</｜DSML｜ parameter>
...
</｜DSML｜ invoke>
<｜DSML｜ invoke name="$TOOL_NAME2">
...
</｜DSML｜ invoke>
</｜DSML｜ calls>

String parameters should be specified as is and set `string="true"`. For all other types (numbers, \
booleans, arrays, objects), pass the value in JSON format and set `string="false"`.

If thinking_mode is enabled (triggered by <think>), you MUST output your complete reasoning inside \
<think>...</think> BEFORE any tool calls or final response.

Otherwise, output directly after </think> with tool calls or final response.

### Available Tool Schemas

{schemas}

You MUST strictly follow the above defined tool name and parameter schemas to invoke tool calls.
"""
_FORMAT = "\n\n## Response Format:\n\nYou MUST strictly adhere to the following schema to reply:\n"


@dataclass(frozen=True)
class Piece:
    """Text, or ids as they are; `weight` of its tokens in the loss."""

    content: str | Sequence[int]
    weight: float


@dataclass
class Document:
    """`pictures` are uint8 [H, W, 3], one for each image mark in the pieces, in order."""

    pieces: list[Piece] = field(default_factory=list)
    pictures: list[np.ndarray] = field(default_factory=list)


@dataclass(frozen=True)
class Turn:
    """A user's words and the answer; `content` may be ids (prose cut from the corpus)."""

    user: str | Sequence[str | Sequence[int]]
    answer: str


def tools_text(schemas: Iterable[dict[str, Any]]) -> str:
    """The system text that offers functions (name, description, parameters)."""
    return _TOOLS.replace("{schemas}", "\n".join(json.dumps(s) for s in schemas))


def format_text(schema: dict[str, Any]) -> str:
    """The system text that asks for JSON of a schema."""
    return _FORMAT + json.dumps(schema)


def call_text(name: str, arguments: dict[str, Any]) -> str:
    """The answer that calls one function."""
    lines = []
    for key, value in arguments.items():
        is_text = isinstance(value, str)
        shown = value if is_text else json.dumps(value)
        flag = "true" if is_text else "false"
        lines.append(
            f'<｜DSML｜ parameter name="{key}" string="{flag}">{shown}</｜DSML｜ parameter>\n'
        )
    inner = "".join(lines)
    return (
        f'\n\n<｜DSML｜ calls>\n<｜DSML｜ invoke name="{name}">\n{inner}'
        "</｜DSML｜ invoke>\n</｜DSML｜ calls>"
    )


def conversation(turns: Sequence[Turn], system: str = "") -> Document:
    """The whole talk as one document. A tool's result is a user's turn, `<tool_result>` around."""
    document = Document([Piece(BOS + (SYSTEM + system if system else ""), 0.0)])
    for turn in turns:
        parts = [turn.user] if isinstance(turn.user, str) else list(turn.user)
        document.pieces.append(Piece(USER, 0.0))
        document.pieces += [Piece(part, PROMPT_WEIGHT) for part in parts]
        document.pieces.append(Piece(ANSWER, 0.0))
        document.pieces.append(Piece(turn.answer + EOS, 1.0))
    return document


def prompt_text(turns: Sequence[Turn], system: str = "") -> str:
    """What the model is given before the last answer (texts only)."""
    document = conversation(turns, system)
    return "".join(str(piece.content) for piece in document.pieces[:-1])


class Encoder:
    """Documents to ids. A picture's mark becomes `span_tokens` image ids."""

    def __init__(self, tokenizer: Tokenizer, image_token_id: int, span_tokens: int) -> None:
        self.tokenizer = tokenizer
        self.image_token_id = image_token_id
        self.span_tokens = span_tokens

    def ids(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text, add_special_tokens=False).ids)

    def encode(self, document: Document) -> tuple[np.ndarray, np.ndarray]:
        """(ids int64 [n], weights float32 [n]): a token's weight is that of predicting it."""
        ids: list[int] = []
        weights: list[float] = []
        for piece in document.pieces:
            own = self.ids(piece.content) if isinstance(piece.content, str) else piece.content
            for token in own:
                is_image = token == self.image_token_id
                n = self.span_tokens if is_image else 1
                ids += [token] * n
                weights += [0.0 if is_image else piece.weight] * n
        return np.array(ids, dtype=np.int64), np.array(weights, dtype=np.float32)
