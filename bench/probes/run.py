"""Ask the probes: of the forward without caches, of the engine, or of a server; print a table.

    python bench/probes/run.py --model demo --cases 20 --out probes.json          # no caches
    python bench/probes/run.py --model demo --cases 4 --engine                    # the `all` engine
    python bench/probes/run.py --url http://127.0.0.1:8000/v1 --key KEY --cases 4 # any server

Without caches one forward over prompt and answer decides: greedy decoding gives exactly the wanted
answer iff every token of it is the most likely one after those before. `--engine` and `--url`
generate, and compare with what the forward says of the same case.
"""

from __future__ import annotations

import argparse
import json
import time
import urllib.request
from base64 import b64encode
from collections import defaultdict
from io import BytesIO
from pathlib import Path

import numpy as np
import torch
from grid import Case, branch_cases, picture_cases, text_cases

from headrace.core.request import Sampling
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
        document = conversation(case.task.turns, case.task.system)
        ids, _ = self.encoder.encode(document)
        answer = self.encoder.ids(str(document.pieces[-1].content))
        logits = self.logits(ids, case.picture)
        said = logits[len(ids) - len(answer) - 1 : -1].argmax(-1)
        return said.tolist() == answer


class EngineRun:
    """The `all` engine: caches, blocks, quantised KV. Texts only."""

    def __init__(self, model: str, numerics: str) -> None:
        from headrace.engine.llm import LLM

        self.llm = LLM(model, numerics=numerics)

    def answer(self, case: Case) -> str:
        document = conversation(case.task.turns, case.task.system)
        prompt = "".join(str(piece.content) for piece in document.pieces[:-1])
        ids = self.llm.tokenizer.encode(prompt, add_special_tokens=False).ids
        done = self.llm.generate([ids], Sampling(temperature=0.0), max_tokens=160)[0]
        return str(self.llm.tokenizer.decode(list(done.token_ids), skip_special_tokens=False))


class ServerRun:
    """Any OpenAI-compatible server."""

    def __init__(self, url: str, key: str, model: str) -> None:
        self.url, self.key, self.model = url.rstrip("/"), key, model

    def answer(self, case: Case) -> str:
        messages: list[dict[str, object]] = []
        if case.task.system:
            messages.append({"role": "system", "content": case.task.system})
        for turn in case.task.turns:
            messages.append({"role": "user", "content": self._content(str(turn.user), case)})
            messages.append({"role": "assistant", "content": turn.answer})
        body = {"model": self.model, "messages": messages[:-1], "temperature": 0, "max_tokens": 160}
        request = urllib.request.Request(
            f"{self.url}/chat/completions",
            json.dumps(body).encode(),
            {"Content-Type": "application/json", "Authorization": f"Bearer {self.key}"},
        )
        with urllib.request.urlopen(request, timeout=300) as response:
            return str(json.load(response)["choices"][0]["message"]["content"])

    def _content(self, text: str, case: Case) -> object:
        if case.picture is None or not text.startswith("<｜image｜>"):
            return text
        from PIL import Image

        file = BytesIO()
        Image.fromarray(case.picture).save(file, "PNG")
        url = "data:image/png;base64," + b64encode(file.getvalue()).decode()
        words = text.removeprefix("<｜image｜>\n\n")
        parts = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": words}]
        return parts


def main() -> None:
    parser = argparse.ArgumentParser(description="ask the probes")
    parser.add_argument("--model", default="demo")
    parser.add_argument("--cases", type=int, default=20, help="of each cell")
    parser.add_argument("--probes", default="", help="P1,P4: only these")
    parser.add_argument("--engine", action="store_true")
    parser.add_argument("--numerics", default="fast")
    parser.add_argument("--url")
    parser.add_argument("--key", default="")
    parser.add_argument("--without-engram", action="store_true", help="tables of zeros")
    parser.add_argument("--out", type=Path)
    a = parser.parse_args()
    cases = text_cases(a.cases) + branch_cases(a.cases)
    if not a.engine:  # it is given token ids, so no pictures
        cases += picture_cases(a.cases)
    wanted = set(filter(None, a.probes.split(",")))
    cases = [c for c in cases if not wanted or c.probe in wanted]
    forward = Forward(a.model, without_engram=a.without_engram)
    run: EngineRun | ServerRun | None = None
    if a.engine:
        run = EngineRun(a.model, a.numerics)
    elif a.url:
        run = ServerRun(a.url, a.key, a.model)
    cells: dict[str, dict[str, list[tuple[bool, bool]]]] = defaultdict(lambda: defaultdict(list))
    began = time.monotonic()
    for case in cases:
        alone = forward.judge(case)
        good = alone if run is None else run.answer(case) == case.task.answer
        cells[case.probe][case.cell].append((good, alone))
        if a.out:  # after every case: a run that is ended leaves what it has seen
            counted = {
                p: {c: [sum(g for g, _ in r), sum(w for _, w in r), len(r)] for c, r in own.items()}
                for p, own in cells.items()
            }
            a.out.write_text(json.dumps(counted, indent=1) + "\n", "utf-8")
    for probe, own in cells.items():
        for cell, results in own.items():
            right, same = sum(g for g, _ in results), sum(g == w for g, w in results)
            print(
                f"{probe:4} {cell:>8}  right {right}/{len(results)}  as forward {same}", flush=True
            )
    print(f"{len(cases)} cases in {time.monotonic() - began:.0f} s")


if __name__ == "__main__":
    main()
