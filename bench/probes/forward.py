"""The forward without caches over a whole text: what greedy decoding says, all tokens at once."""

from __future__ import annotations

import numpy as np
import torch
from grid import Case

from headrace.model import ModelConfig, package_tokenizer
from headrace.model.checkpoint import Checkpoint, Selection
from headrace.model.config import checkpoint_folder
from headrace.model.training.attend import Attend, Masks
from headrace.model.training.chat import Encoder, conversation
from headrace.model.training.data import Corpus, Mixer, span_tokens
from headrace.model.training.net import Net, Texts
from headrace.model.training.tower import picture_rows
from headrace.model.training.weights import Used, build_stacks, stack_tensors


class Forward:
    """The checkpoint's weights in the forward without caches, float32, selection on."""

    def __init__(self, model: str, *, without_engram: bool = False) -> None:
        folder = checkpoint_folder(model)
        if folder is None:
            raise SystemExit(f"{model} names no checkpoint")
        self.config = ModelConfig.load(model)
        stacks = build_stacks(self.config)
        with Checkpoint.open(folder, Selection.FULL) as checkpoint:
            tensors = dict(checkpoint.tensors(torch.float32, None))
        if without_engram:
            tensors = {
                k: torch.zeros_like(v) if k.endswith("engram.embed.weight") else v
                for k, v in tensors.items()
            }
        self.used = Used(stacks, stack_tensors(stacks, tensors), torch.float32, rounded=False)
        self.net = Net(self.config, Attend(self.config))
        self.mixer = Mixer(self.config, Corpus(None), seed=0, batch=1, length=64)
        tokenizer = package_tokenizer(self.config.vocab_size)
        self.encoder = Encoder(tokenizer, self.config.image_token_id, span_tokens(self.config))

    @torch.no_grad()
    def logits(self, ids: np.ndarray, picture: np.ndarray | None) -> torch.Tensor:
        """[n, vocab] of one text."""
        n = len(ids) + -len(ids) % 8
        padded = np.full(n, self.config.pad_token_id, np.int64)
        padded[: len(ids)] = ids
        positions = np.arange(n)[None]
        image = (padded == self.config.image_token_id)[None]
        document = torch.ones((1, n), dtype=torch.int32)
        rows, places = torch.zeros(0), torch.zeros((0, 1), dtype=torch.int64)
        if picture is not None:
            rows = picture_rows(self.used, self.config, torch.from_numpy(picture)[None])
            places = torch.from_numpy(np.flatnonzero(image[0]))[None]
        texts = Texts(
            ids=torch.from_numpy(padded)[None],
            positions=torch.from_numpy(positions),
            document=document,
            history=document,
            image=torch.from_numpy(image),
            engram_rows=torch.from_numpy(self.mixer.engram_rows(padded[None], positions, image)),
            pictures=torch.zeros(0),
            picture_places=places,
        )
        masks = Masks(document, document, torch.arange(1))
        out = self.net.forward(self.used, texts, masks, rows, selecting=True)
        return out.hidden[: len(ids)] @ self.used["head.weight"].T

    def judge(self, case: Case) -> bool:
        """Whether greedy decoding answers word for word."""
        said, answer = self.said(case)
        return said == answer

    def said(self, case: Case) -> tuple[list[int], list[int]]:
        """The likeliest token after each begin of the wanted answer, and that answer's tokens."""
        document = conversation(case.task.turns, case.task.system)
        ids, _ = self.encoder.encode(document)
        answer = self.encoder.ids(str(document.pieces[-1].content))
        logits = self.logits(ids, case.picture)
        said = logits[len(ids) - len(answer) - 1 : -1].argmax(-1)
        return said.tolist(), answer
