"""Engram addresses, token map, random weights, named models, and the batch's contract."""

from __future__ import annotations

import dataclasses
import hashlib

import numpy as np
import pytest
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from headrace.model import (
    BatchError,
    ConfigError,
    ModelConfig,
    Numerics,
    StateError,
    Trunk,
    build_token_map,
    load_named,
    package_tokenizer,
    reserved_token_ids,
)
from headrace.model.engram_hash import build_hashes, map_history, multipliers, table_primes
from headrace.model.weights import Init, TensorSpec, random_tensor, random_tensors, tensor_specs


def test_published_multipliers():
    assert multipliers(1, 4, 99092).tolist() == [
        76632096046245,
        4839876093313,
        35959672319349,
        73987337458391,
    ]
    assert multipliers(14, 4, 99092).tolist() == [
        67716810739261,
        51510806800915,
        30921347202721,
        82619226485591,
    ]


def test_published_primes():
    first, second = table_primes(2, 4, 8, 16_000_000)
    assert (first[0][0], first[-1][-1]) == (16_000_057, 16_000_463)
    assert (second[0][0], second[-1][-1]) == (16_000_477, 16_000_889)
    assert sum(map(sum, first)) == 384_006_168 and sum(map(sum, second)) == 384_016_682
    assert table_primes(1, 4, 2, 997) == [[[997, 1009], [1013, 1019], [1021, 1031]]]


def test_rows_follow_the_definition():
    (h,) = build_hashes((3,), 4, 2, 97, 50)
    mapped = np.array([[7, 49, 0, 13], [1, 1, 1, 1]])
    for row, got in zip(mapped.tolist(), h.rows(mapped).tolist(), strict=True):
        mixed, want, offset = row[0] * int(h.multipliers[0]), [], 0
        for i in range(1, 4):
            mixed ^= row[i] * int(h.multipliers[i])
            for prime in h.primes[i - 1].tolist():
                want.append(mixed % prime + offset)
                offset += prime
        assert got == want
    assert h.n_rows == int(h.primes.sum())


def test_a_dead_position_deadens_all_older_ones():
    token_map = np.arange(100, 200)  # id -> id + 100, so pad 2 -> 102
    none = np.zeros((1, 4), bool)
    image = np.array([[False, True, False, False]])

    def mapped(ids, mask=none):
        return map_history(np.array([ids]), mask, token_map, 2)[0].tolist()

    assert mapped([5, 6, 7, 8]) == [105, 106, 107, 108]
    assert mapped([5, 6, -1, -1]) == [105, 106, 102, 102]
    assert mapped([5, 2, 7, 8]) == [105, 102, 102, 102]
    assert mapped([2, 6, 7, 8]) == [102, 102, 102, 102]
    assert mapped([5, 6, 7, 8], image) == [105, 102, 102, 102]


def tiny_tokenizer() -> Tokenizer:
    """A byte-level vocabulary of chosen pieces; id 5 is half of a two-byte character."""
    pieces = ["a", "A", "Ġa", "Ġ", "ĠĠ", "Ã", "Ã©", "e", "Ċ", "ĉĊ", "1", "Ġ1Ġ", "Ëļ"]
    tokenizer = Tokenizer(models.BPE(vocab={p: i for i, p in enumerate(pieces)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<｜A｜>", special=True)])
    return tokenizer


def test_token_map_folds_case_accents_and_space(tmp_path):
    tokenizer = tiny_tokenizer()
    ids, size = build_token_map(tokenizer)
    a, upper, spaced_a, space, spaces, half, accent, e, newline, tab, one, spaced_one = ids[:12]
    assert a == upper == spaced_a  # case and surrounding space
    assert space == spaces == newline == tab  # a lone run of space stays a space
    assert accent == e and half not in (e, a)  # accents go; broken UTF-8 keeps its raw piece
    assert one == spaced_one
    assert ids[13] == size - 1  # the special token is decoded too, and stands alone
    assert size == len(set(ids.tolist())) and ids[0] == 0
    path = tmp_path / "tokenizer.json"
    tokenizer.save(str(path))
    again = build_token_map(path)
    assert again.compressed_size == size and (again.ids == ids).all()


@pytest.mark.parametrize("name", ["t1", "t2", "toy"])
def test_configured_vocabulary_is_the_package_tokenizers(name):
    config = ModelConfig.load(name)
    ids, size = build_token_map(package_tokenizer(config.vocab_size))
    assert ids.shape == (config.vocab_size,) and size == config.engram_compressed_vocab_size


def test_random_weights_are_pinned():
    """Integer arithmetic only, so the digest holds on every platform."""
    tensor = random_tensor(TensorSpec("layers.0.attn.wq_a.weight", (16, 24), Init.MATRIX), 7)
    digest = hashlib.sha256(tensor.numpy().astype("<f4").tobytes()).hexdigest()
    assert digest == "0391c5a8d737e9d945b8c3abd0a36890fbba1b22bdad9d77ea5abb539b013ec5"
    normal = random_tensor(TensorSpec("embed.weight", (400, 250), Init.EMBEDDING), 1).double()
    assert abs(normal.mean()) < 0.01 and abs(normal.std() - 1) < 0.01
    assert abs((normal**4).mean() - 2.85) < 0.1  # eight summands: 3 - 1.2 / 8
    other = random_tensor(TensorSpec("head.weight", (400, 250), Init.EMBEDDING), 1).double()
    assert abs((normal * other).mean()) < 0.01


def test_t1_has_the_published_number_of_parameters():
    config = ModelConfig.load("t1")
    counts = {s.name: int(np.prod(s.shape)) for s in tensor_specs(config)}
    engram = sum(n for name, n in counts.items() if "engram" in name)
    drafter = sum(n for name, n in counts.items() if name.startswith("mtp."))
    assert drafter == pytest.approx(1.29e6, rel=0.01)
    assert sum(counts.values()) == pytest.approx(9.22e6, rel=0.01)
    assert counts["embed.weight"] + counts["head.weight"] == 4096 * 192 * 2
    assert engram == pytest.approx(0.77e6, rel=0.01)
    assert set(random_tensors(ModelConfig.load("toy"), 1)) == {
        s.name for s in tensor_specs(ModelConfig.load("toy"))
    }


def test_named_model_masks_special_tokens_but_eos(driver_type, part_type, make_text):
    trunk = load_named("toy", 3, Numerics.FAST)
    tokenizer = package_tokenizer(trunk.config.vocab_size)
    reserved = reserved_token_ids(tokenizer, trunk.config.eos_token_id)
    assert trunk.config.eos_token_id not in reserved and 0 in reserved
    assert trunk.config.image_token_id in reserved
    text = make_text(20, 1, trunk.config)
    logits = driver_type(trunk).call(part_type(text, 0, 20, 0, (0,), logits_from=0)).logits
    masked = (logits == -torch.inf).all(0).nonzero().flatten().tolist()
    assert masked == list(reserved)
    assert logits[:, trunk.config.eos_token_id].isfinite().all()


def test_weights_id_names_seed_config_and_map():
    config = ModelConfig.load("toy")
    size = config.engram_compressed_vocab_size
    base = np.arange(config.vocab_size) % size
    ids = {
        Trunk.random(c, seed, Numerics.FAST, token_map=m).weights_id
        for c, seed, m in (
            (config, 1, base),
            (config, 2, base),
            (dataclasses.replace(config, swiglu_limit=9.0), 1, base),
            (config, 1, base[::-1].copy()),
        )
    }
    assert len(ids) == 4
    assert Trunk.random(config, 1, Numerics.INVARIANT, token_map=base).weights_id in ids
    with pytest.raises(ConfigError, match="engram_compressed_vocab_size"):
        Trunk.random(config, 1, Numerics.FAST, token_map=base % 7)
    with pytest.raises(ConfigError, match="masked_token_ids"):
        Trunk.random(config, 1, Numerics.FAST, masked_token_ids=[5000])


BROKEN = [
    ({"positions": torch.tensor([4, 6, 7])}, "consecutive"),
    ({"sequence": torch.tensor([0, 1, 0])}, "adjacent"),
    ({"slots": torch.tensor([0, 0, 1])}, "two slots"),
    ({"decoder": torch.tensor([True, False, True])}, "suffix"),
    ({"decoder": torch.tensor([False, False, False])}, "not a decoder row"),
    ({"block_tables": torch.tensor([[-1]])}, "lacks a block"),
    ({"block_tables": torch.tensor([[9]])}, "block_tables"),
    ({"slots": torch.tensor([9, 9, 9])}, "slots"),
    ({"positions": torch.tensor([126, 127, 128])}, "columns"),
    ({"history_ids": torch.full((3, 3), 5000)}, "history_ids"),
    ({"history_ids": torch.full((3, 4), 5)}, "history_ids"),
    ({"history_ids": torch.full((3, 3), -1)}, "history_ids"),
]


@pytest.mark.parametrize(("change", "message"), BROKEN)
def test_broken_batches_are_refused_before_anything_changes(
    change, message, make_trunk, make_text, driver_type, part_type
):
    driver = driver_type(make_trunk("toy"), n_blocks=2, n_slots=2)
    text = make_text(8, 1, driver.trunk.config)
    good = driver.batch([part_type(text, 4, 7, 0, (0,), swa_floor=4, decoder_floor=4)])
    before = driver.state.rings.clone(), driver.state.blocks.clone()
    with pytest.raises((BatchError, StateError), match=message):
        driver.trunk.forward(dataclasses.replace(good, **change), driver.state)
    assert torch.equal(driver.state.rings, before[0])
    assert torch.equal(driver.state.blocks, before[1])
    driver.trunk.forward(good, driver.state)


def test_beyond_the_longest_position_is_refused(make_trunk, make_text, driver_type, part_type):
    driver = driver_type(make_trunk("toy"), n_blocks=17)
    text = make_text(2050, 1, driver.trunk.config)
    with pytest.raises(BatchError, match="2048"):
        driver.call(part_type(text, 2047, 2049, 0, tuple(range(17)), swa_floor=2047))


def test_image_rows_take_their_embeddings(make_trunk, make_text, text_type, driver_type, part_type):
    """Window keys of layer 0 come from the embedding alone: other ids inside the span change
    nothing, other rows change the span's keys and only those."""
    trunk = make_trunk("t1")
    span = range(10, 20)
    rows = {p: torch.randn(192, generator=torch.Generator().manual_seed(p)) for p in span}
    ids = make_text(30, 1, trunk.config).ids
    other_ids = tuple(i + 1 if p in span else i for p, i in enumerate(ids))
    other_rows = {p: row + 1 for p, row in rows.items()}

    def layer_0(ids, rows):
        driver = driver_type(trunk)
        text = text_type(ids, frozenset(span), rows)
        assert not driver.call(part_type(text, 0, 30, 0, (0,))).logits.isnan().any()
        return driver.state.rings[0, 0, :30]

    plain = layer_0(ids, rows)
    assert torch.equal(plain, layer_0(other_ids, rows))
    changed = (plain != layer_0(ids, other_rows)).any(-1)
    assert changed.tolist() == [p in span for p in range(30)]
