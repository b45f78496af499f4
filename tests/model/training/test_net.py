"""The differentiable forward against the serving trunk: same weights, same logits."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from headrace.model import Numerics
from headrace.model.engram_hash import map_history
from headrace.model.training.attend import Attend, Masks
from headrace.model.training.net import Net, Texts
from headrace.model.training.tower import picture_rows
from headrace.model.training.weights import Used, build_stacks, stack_tensors
from headrace.model.vision import VisionTower
from headrace.model.vision_weights import random_vision_tensors
from headrace.model.weights import random_tensors

GRID = 2.0**-16  # of published logits in `invariant` numerics


def texts_of(trunk, parts):
    """Texts (ids, image places) side by side in one row, each from a multiple of eight columns."""
    c = trunk.config
    length = sum(-(-len(text.ids) // 8) * 8 for text in parts)
    ids = np.full(length, c.pad_token_id)
    document, positions = np.zeros(length, int), np.zeros(length, int)
    image = np.zeros(length, bool)
    rows = np.zeros((len(trunk.hashes), length, trunk.hashes[0].primes.size), int)
    at = 0
    for number, text in enumerate(parts, 1):
        n = len(text.ids)
        own = np.array(text.ids)
        mine = np.zeros(n, bool)
        mine[list(text.image)] = True
        padded = -(-n // 8) * 8
        document[at : at + padded] = number
        positions[at : at + padded] = np.arange(padded)
        ids[at : at + n], image[at : at + n] = own, mine
        back = np.stack([np.roll(own, k) for k in range(c.engram_max_ngram_size)], axis=1)
        flags = np.stack([np.roll(mine, k) for k in range(c.engram_max_ngram_size)], axis=1)
        for k in range(1, c.engram_max_ngram_size):
            back[:k, k], flags[:k, k] = -1, False
        mapped = map_history(back, flags, trunk.token_map, c.engram_pad_token_id)
        for layer, h in enumerate(trunk.hashes):
            rows[layer, at : at + n] = h.rows(mapped)
        at += padded
    row = torch.from_numpy
    return Texts(
        ids=row(ids)[None],
        positions=row(positions)[None],
        document=row(document)[None].int(),
        history=row(document)[None].int(),
        image=row(image)[None],
        engram_rows=row(rows)[:, None],
        pictures=torch.zeros((0, 96, 96, 3), dtype=torch.uint8),
        picture_places=torch.zeros((0, 22), dtype=torch.int64),
    )


def run_net(trunk, texts, *, selecting=True, history=None, rows=None):
    c = trunk.config
    stacks = build_stacks(c)
    values = stack_tensors(stacks, random_tensors(c, seed=1))
    used = Used(stacks, values, torch.float64, rounded=False)
    own = texts.document if history is None else history
    masks = Masks(texts.document, own, torch.arange(1, texts.ids.shape[1]))
    net = Net(c, Attend(c))
    with torch.no_grad():
        out = net.forward(
            used, texts, masks, torch.zeros(0) if rows is None else rows, selecting=selecting
        )
    return out.hidden @ used["head.weight"].T, net


def trunk_logits(trunk, text, driver_type, part_type, **floors):
    driver = driver_type(trunk)
    n = len(text.ids)
    result = driver.call(part_type(text, 0, n, 0, (0,), logits_from=0, **floors))
    return result.logits


@pytest.mark.parametrize(("name", "n"), [("t1", 100), ("toy", 90)])
def test_logits_of_one_text(name, n, make_trunk, make_text, driver_type, part_type):
    trunk = make_trunk(name, Numerics.INVARIANT)
    text = make_text(n, 21, trunk.config)
    ours, _ = run_net(trunk, texts_of(trunk, [text]))
    want = trunk_logits(trunk, text, driver_type, part_type)
    assert (ours[: len(want)] - want).abs().max() <= GRID


def test_texts_in_one_row_do_not_see_each_other(make_trunk, make_text, driver_type, part_type):
    """Two texts, the first of odd length, give what each gives alone."""
    trunk = make_trunk("t1")
    parts = [make_text(45, 3, trunk.config), make_text(60, 4, trunk.config)]
    ours, _ = run_net(trunk, texts_of(trunk, parts))
    for text, start in zip(parts, (0, 48), strict=True):
        want = trunk_logits(trunk, text, driver_type, part_type)
        assert (ours[start : start + len(text.ids)] - want).abs().max() <= GRID


@pytest.mark.parametrize("keep", [32, 44])
def test_history_cut_is_a_truncated_prefill(keep, make_trunk, make_text, driver_type, part_type):
    """Decoder windows cut at N - keep: rows from there on are those of a run of that keep."""
    trunk, n = make_trunk("t1"), 90
    text = make_text(n, 22, trunk.config)
    texts, floor = texts_of(trunk, [text]), n - keep
    history = texts.document + (torch.arange(texts.ids.shape[1]) >= floor).int()
    ours, _ = run_net(trunk, texts, history=history)
    driver = driver_type(trunk)
    floors = {"decoder_from": floor, "decoder_floor": floor, "logits_from": floor}
    result = driver.call(part_type(text, 0, n, 0, (0,), **floors))
    assert (ours[floor:n] - result.logits).abs().max() <= GRID


def test_a_picture_in_a_text(make_trunk, make_text, driver_type, part_type, text_type):
    """Tower rows, their places, the router's other bias and the dead n-grams of a span."""
    trunk = make_trunk("t1")
    c = trunk.config
    pixels = np.random.default_rng(0).integers(0, 256, (96, 96, 3)).astype(np.uint8)
    tower = VisionTower.random(c, 1, Numerics.INVARIANT)
    want_rows = tower.encode(pixels)
    plain = list(make_text(50, 5, c).ids)
    span = range(9, 9 + len(want_rows))
    ids = plain[:9] + [c.image_token_id] * len(span) + plain[9:]
    embeddings = dict(zip(span, want_rows, strict=True))
    text = text_type(tuple(ids), frozenset(span), embeddings)
    stacks = build_stacks(c)
    values = stack_tensors(stacks, random_vision_tensors(c, 1))
    used = Used(stacks, values, torch.float64, rounded=False)
    rows = picture_rows(used, c, torch.from_numpy(pixels)[None])
    assert (rows - want_rows).abs().max() <= GRID
    texts = texts_of(trunk, [text])
    texts.picture_places = torch.tensor(list(span))[None]
    ours, _ = run_net(trunk, texts, rows=want_rows)
    want = trunk_logits(trunk, text, driver_type, part_type)
    assert (ours[: len(want)] - want).abs().max() <= GRID
