"""Roundings, balance, template, mix and files of training, each against something else."""

from __future__ import annotations

import json
import math
from collections import Counter
from random import Random

import deepseek_recipe as recipe
import numpy as np
import pytest
import torch

from headrace.kernels import formats, kernels_for
from headrace.kernels.balance import balance
from headrace.kernels.mhc import sinkhorn
from headrace.model import ConfigError, ModelConfig, package_tokenizer
from headrace.model.checkpoint import Selection, read_config, write_values
from headrace.model.checkpoint.encoding import quantise, widen
from headrace.model.checkpoint.stored import FP8_ROWS, MXFP4, Encoding, Kind
from headrace.model.config import checkpoint_folder
from headrace.model.training import fake, recall, scenes, talk
from headrace.model.training.chat import Turn, conversation, prompt_text
from headrace.model.training.corpus import SOURCES, check_licence
from headrace.model.training.data import PART_NAMES, Corpus, Mixer
from headrace.model.training.export import SHARD_BYTES, trained_tensors
from headrace.model.training.optim import orthogonalise
from headrace.model.training.trainer import Plan, Trainer
from headrace.model.training.weights import build_stacks, stack_tensors, unstack


def spread_values(*shape: int) -> torch.Tensor:
    """Values of many magnitudes, with zeros and ties."""
    rng = torch.Generator().manual_seed(0)
    x = torch.randn(shape, generator=rng) * 2.0 ** torch.randint(-9, 9, shape, generator=rng)
    x[..., 0] = 0.0
    x[..., 1:5] = torch.tensor([0.25, 1.25, 2.5, 5.0])
    return x


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_rows_are_rounded_as_stored_rows_are(dtype):
    x = spread_values(200, 64).to(dtype)
    k = kernels_for("cpu")
    fp8 = k.dequantize_fp8_rows(k.quantize_fp8_rows(x), dtype)
    nvfp4 = k.dequantize_nvfp4_rows(k.quantize_nvfp4_rows(x), dtype)
    for ours, theirs in (
        (fake.fp8, fp8),
        (fake.mxfp4, formats.round_mxfp4(x)),
        (fake.nvfp4, nvfp4),
    ):
        # The straight-through form x + (r - x) costs one rounding of its own.
        assert (ours(x) - theirs).abs().max() <= x.abs().max() * torch.finfo(dtype).eps


@pytest.mark.parametrize("encoding", [MXFP4, FP8_ROWS, Encoding(Kind.FP8, (32, 32))])
def test_weights_are_rounded_as_the_checkpoint_stores_them(encoding):
    x = spread_values(96, 160)
    data, scale = quantise("x", encoding, x)
    out = torch.empty_like(x)
    widen("x", encoding, data, scale, out)
    ours = fake.weight(x.unsqueeze(0), encoding)[0]
    assert (ours - out).abs().max() <= x.abs().max() * torch.finfo(torch.float32).eps


def test_a_rounded_value_passes_its_gradient_on():
    x = spread_values(4, 32).requires_grad_()
    fake.nvfp4(x).sum().backward()
    assert torch.equal(x.grad, torch.ones_like(x))


def test_balance_and_its_gradient():
    """The forward is serving's; the gradient is autograd's through the iterations, converged."""
    logits = torch.randn(300, 4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    served = sinkhorn(logits.clone(), 20, 1e-6)
    assert (balance(logits, 20, 1e-6) - served).abs().max() < 1e-14
    weight = torch.randn(300, 4, 4, dtype=torch.float64)
    ours, theirs = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    (balance(ours, 200, 0.0) * weight).sum().backward()
    c = torch.softmax(theirs, -1)
    for _ in range(200):
        c = c / c.sum(-2, keepdim=True)
        c = c / c.sum(-1, keepdim=True)
    (c * weight).sum().backward()
    assert (ours.grad - theirs.grad).abs().max() < 1e-9


def test_orthogonalised_matrices_have_singular_values_near_one():
    x = torch.randn(3, 24, 40, generator=torch.Generator().manual_seed(2))
    values = torch.linalg.svdvals(orthogonalise(x).float())
    assert values.min() > 0.5 and values.max() < 1.5


TALKS = [
    ([Turn("Hello there.", "Hello.")], ""),
    ([Turn("My name is Tom.", "Nice to meet you, Tom."), Turn("Who am I?", "Tom.")], "Be brief."),
]


@pytest.mark.parametrize(("turns", "system"), TALKS)
def test_prompts_are_those_of_the_protocol_library(turns, system):
    messages = [{"role": "system", "content": system}] if system else []
    for turn in turns:
        messages += [
            {"role": "user", "content": turn.user},
            {"role": "assistant", "content": turn.answer},
        ]
    assert library_text({"messages": messages[:-1]}) == prompt_text(turns, system)


def test_tool_texts_are_those_of_the_protocol_library():
    task = talk.tool_call(Random(4))
    offered = [t for t in talk.TOOLS if f'"name": "{t["name"]}"' in task.system]
    order = sorted(offered, key=lambda t: task.system.index(f'"name": "{t["name"]}"'))
    name = "set_alarm"
    arguments = {"hour": 7, "minute": 30}
    turns = [
        Turn("Set an alarm.", talk.call_text(name, arguments)),
        Turn("<tool_result>done</tool_result>", ""),
    ]
    call = {"name": name, "arguments": json.dumps(arguments)}
    messages = [
        {"role": "user", "content": "Set an alarm."},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "c", "type": "function", "function": call}],
        },
        {"role": "tool", "tool_call_id": "c", "content": "done"},
    ]
    body = {"messages": messages, "tools": [{"type": "function", "function": t} for t in order]}
    assert library_text(body) == prompt_text(turns, task.system)


def test_json_texts_are_those_of_the_protocol_library():
    tasks = (talk.json_answer(Random(seed)) for seed in range(50))
    task = next(t for t in tasks if t.system)
    schema = json.loads(task.system[task.system.index("{") :])
    asked = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    messages = [{"role": "user", "content": task.turns[0].user}]
    body = {"messages": messages, "response_format": asked}
    assert library_text(body) == prompt_text(task.turns, task.system)
    assert set(json.loads(task.answer)) == set(schema["properties"])


def library_text(body: dict) -> str:
    """The prompt of a chat body, as text with its special tokens."""
    tokenizer = package_tokenizer(4096)
    own = recipe.Tokenizer.from_str(tokenizer.to_str())
    options = recipe.ConversionOptions(
        default_thinking_mode=False,
        thinking_max_tokens_upper_bound=1 << 30,
        non_thinking_max_tokens_upper_bound=1 << 30,
    ).with_model_alias("m", recipe.ModelVersion.DeepseekV41Flash)
    request = recipe.ChatCompletionRequest({**body, "model": "m"}).convert(options)
    ids = recipe.DeepseekV41Encoding().with_tokenizer(own).encode(request.conversation)
    return tokenizer.decode(list(ids), skip_special_tokens=False)


def toy_mixer(**changes) -> Mixer:
    sizes = {"seed": 3, "batch": 2, "length": 640, "pictures": 1} | changes
    return Mixer(ModelConfig.load("toy"), Corpus(None), **sizes)


def test_a_batch_is_decided_by_seed_and_number():
    first, second = toy_mixer().make(5), toy_mixer(first=4).make(5)
    assert all(torch.equal(first[k], second[k]) for k in first)
    assert not torch.equal(first["ids"], toy_mixer().make(6)["ids"])


def test_other_shares_and_longer_recall_are_what_was_asked_for():
    def tokens(**changes) -> np.ndarray:
        made = [toy_mixer(length=2048, **changes).make(n)["part"] for n in range(8)]
        return np.bincount(torch.cat(made).flatten().numpy(), minlength=len(PART_NAMES))

    recall_at = PART_NAMES.index("recall")
    usual, more = tokens(), tokens(shares={"recall": 2.0})
    assert usual[recall_at] / usual.sum() < 0.35 and more[recall_at] / more.sum() > 0.5
    assert (more > 0).all()

    def long_texts(share: float) -> list[bool]:
        """Of the rows without pictures: whether the first text is recall of half the row."""
        found = []
        for number in range(12):
            made = toy_mixer(length=2048, long_recall=share).make(number)
            for row, image in enumerate(made["image"].any(-1)):
                first = made["part"][row][made["document"][row] == 1]
                if not image:
                    found.append(bool(first[0] == recall_at and len(first) > 900))
        return found

    assert len(long_texts(0.0)) == 12 and sum(long_texts(0.0)) <= 2
    assert sum(long_texts(1.0)) >= 8


def test_rows_are_packed_as_the_forward_expects():
    made = toy_mixer().make(0)
    document, positions = made["document"], made["positions"]
    starts = (positions == 0) & (document > 0)
    assert starts.nonzero()[:, 1].remainder(8).eq(0).all()
    assert (document[:, 1:] - document[:, :-1]).ge(0).all()
    weights, ids = made["weights"], made["ids"]
    ends = torch.ones_like(document, dtype=torch.bool)
    ends[:, :-1] = document[:, 1:] != document[:, :-1]
    assert weights[ends].eq(0).all(), "a text's last token must not predict the next text"
    learnt = weights > 0
    following = torch.roll(ids, -1, dims=1)
    assert torch.equal(made["targets"][learnt], following[learnt])
    flat = ids.flatten()[made["picture_places"].flatten()]
    assert flat.eq(ModelConfig.load("toy").image_token_id).all()
    assert made["image"].sum() == made["picture_places"].numel()


def test_tasks_hold_their_answers():
    """The answer of a recall task can be read off its text: codes, tables, the last setting."""
    rng = Random(9)
    table = recall.table(rng, 30)
    key, value = table.answer.split(": ")
    assert f"\n{key}: {value}\n" in str(table.turns[0].user)
    setting = recall.overwrite(rng, 5, 40)
    key, value = setting.answer.rstrip(".").split(" is ")
    lines = [x for x in str(setting.turns[0].user).splitlines() if x.startswith(f"Set {key} to")]
    assert lines[-1] == f"Set {key} to {value}." and len(lines) > 1
    for turn in recall.arithmetic(rng, 20).turns:
        left, right = turn.answer.rstrip(".").split(" = ")
        a, sign, b = left.split()
        assert int(right) == (int(a) + int(b) if sign == "+" else int(a) - int(b))


def test_nothing_but_the_codes_tells_a_known_code_from_an_unknown_one():
    """Both kinds of task open alike, tell as many codes and have as long fillers; the unknown code
    is none of those told. A model that had one such sign learnt that sign instead."""
    mixer = Mixer(ModelConfig.load("toy"), Corpus(None), seed=3, batch=1, length=2048)
    openings, counts = {True: Counter(), False: Counter()}, {True: Counter(), False: Counter()}
    rng = Random(11)
    for _ in range(12_000):
        task = mixer.recall_task(rng, 700)
        parts = task.turns[0].user
        if isinstance(parts, str):
            continue
        told = [part for part in parts if isinstance(part, str) and " is " in part]
        if not told or " code " not in task.answer or task.turns[0].answer == "Noted.":
            continue
        known = "do not know" not in task.answer
        key = task.answer.rpartition("code of the ")[2].split(" is ")[0].rstrip(".")
        assert known == any(f"code of the {key} is" in part for part in told)
        openings[known][str(parts[0]).startswith("Read this")] += 1
        counts[known][len(told)] += 1
    for seen in (openings, counts):
        n = {known: seen[known].total() for known in seen}
        assert min(n.values()) > 400
        for value in seen[True].keys() | seen[False].keys():
            shares = [seen[known][value] / n[known] for known in seen]
            assert abs(shares[0] - shares[1]) < 0.07, (value, shares)
    assert set(openings[False]) == {True, False}


def test_a_scene_is_what_its_caption_says():
    """Pixels of an item's colour are most frequent in its own cell of the grid."""
    for seed in range(20):
        scene = scenes.make_scene(Random(seed), n_items=3)
        pixels = scene.pixels.astype(int)
        for item in scene.items:
            off = np.abs(pixels - np.array(scenes.COLOURS[item.colour])).max(-1) <= 12
            cells = off.reshape(3, 32, 3, 32).sum((1, 3))
            same = [i.place for i in scene.items if i.colour == item.colour]
            assert np.argmax(cells) in same
            assert scenes.PLACES[item.place] in scene.caption


def test_a_source_without_its_licence_is_refused(tmp_path):
    folder = tmp_path / "usr/share/doc" / SOURCES[0].package
    folder.mkdir(parents=True)
    (folder / "copyright").write_text("All rights reserved.")
    with pytest.raises(ConfigError, match=SOURCES[0].package):
        check_licence(SOURCES[0], tmp_path)
    (folder / "copyright").write_text("License:\n MIT")
    check_licence(SOURCES[0], tmp_path)


def test_stacks_give_the_named_tensors_back():
    config = ModelConfig.load("toy")
    stacks = build_stacks(config)
    names = [name for stack in stacks.values() for name in stack.names]
    tensors = {name: torch.randn(stack.shape) for stack in stacks.values() for name in stack.names}
    again = unstack(stacks, stack_tensors(stacks, tensors))
    assert sorted(again) == sorted(names)
    assert all(torch.equal(again[name], tensors[name]) for name in names)


def test_a_toy_learns_and_goes_on_where_it_stopped(tmp_path):
    """Ten steps on one batch lower its loss; a resumed run equals one that was not stopped."""
    plan = Plan("toy", steps=12, batch=1, length=640, warmup=2, select_from=0.5, pictures=1)
    batch = toy_mixer(batch=1).make(0)
    one = Trainer(plan, "cpu")
    losses = [float(one.learn(batch)["loss"]) for _ in range(5)]
    one.save(tmp_path, tmp_path / "state.pt")
    losses += [float(one.learn(batch)["loss"]) for _ in range(3)]
    assert losses[-1] < losses[0] - 0.5
    assert abs(losses[0] - math.log(1024)) < 1.0
    other = Trainer(plan, "cpu")
    other.resume(tmp_path / "state.pt")
    assert other.step == 5
    again = [float(other.learn(batch)["loss"]) for _ in range(3)]
    assert again == losses[5:]


def test_values_are_set_back_when_the_loss_jumps():
    trainer = Trainer(Plan("toy", steps=10, batch=1, length=640), "cpu")
    value = trainer.values["norm.weight"]
    assert not trainer.guard(2.0)
    with torch.no_grad():
        value.add_(5.0)
    assert trainer.guard(float("nan"))
    assert torch.equal(value, torch.ones_like(value)) and trainer.damping == 0.5


def test_every_part_of_the_mix_is_in_a_few_batches():
    mixer = Mixer(ModelConfig.load("demo"), Corpus(None), seed=3, batch=4, length=2048)
    seen = {int(p) for number in range(2) for p in mixer.make(number)["part"].unique()}
    assert seen == set(range(len(PART_NAMES)))


def test_conversation_weighs_answers_alone_in_full():
    document = conversation([Turn("a", "b")])
    assert [piece.weight for piece in document.pieces] == [0.0, 0.0, 0.05, 0.0, 1.0]


def test_a_checkpoint_exported_again_is_the_same_bytes(tmp_path):
    """What training goes on from is what is served: stored values round to themselves."""
    folder = checkpoint_folder("demo")
    release = read_config(json.loads((folder / "config.json").read_text("utf-8")))
    write_values(
        tmp_path / "out",
        release,
        trained_tensors(folder / "config.json", folder, None),
        selection=Selection.FULL,
        max_shard_bytes=SHARD_BYTES,
    )
    shards = sorted(folder.glob("*.safetensors"))
    assert len(shards) == 5
    for shard in shards:
        assert (tmp_path / "out" / shard.name).read_bytes() == shard.read_bytes()
