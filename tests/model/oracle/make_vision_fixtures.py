"""Makes the fixtures of an independent program's picture rows for `test_vision_oracle.py`.

The program is NeMo Automodel 0.7.0 (`nemo-automodel`, Apache-2.0), its `deepseek_v41` components:
the processor resizes and pads a picture and lays out the span, vision module and aligner encode it,
the model puts the role rows between. CPU, float32. Kept per case: the padded pixels and the rows.
Weights are ours, made from (config, seed) and copied into it by name. A table of grids is kept too,
each size passed through its planner until nothing changes.

Run in the throw-away environment that `make_nemo_fixtures.py` describes:

    OMP_NUM_THREADS=1 PYTHONPATH=build/ns v/bin/python tests/model/oracle/make_vision_fixtures.py

The processor rounds its inputs to bfloat16, 256 distinct levels; the level is looked up and the
tower gets it in float32, so that both sides compute with the same numbers.
"""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

from headrace.model.config import ModelConfig, VisionConfig
from headrace.model.vision_weights import random_vision_tensors

FIXTURE = Path(__file__).parent / "fixtures" / "vision.npz"
NEMO_VERSION = "0.7.0"
IMAGE_TOKEN, TEXT_TOKEN = 7, 5

# The tower that T1 was first measured with, and one with the release's head size.
PATCH_14 = {
    **{"patch_size": 14, "num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4},
    **{"intermediate_size": 96, "max_image_tokens": 64, "min_pixels": 1764},
}
HEAD_64 = PATCH_14 | {"hidden_size": 128, "num_attention_heads": 2}


class Case(NamedTuple):
    name: str
    config: str
    seed: int
    width: int
    height: int
    changes: dict[str, Any] = {}  # noqa: RUF012  # of the config's vision section


CASES = (
    Case("t1-square", "t1", 31, 200, 200),
    Case("t1-wide", "t1", 32, 176, 56),
    Case("t1-tall", "t1", 33, 31, 200),
    Case("toy-small", "toy", 34, 64, 48),
    Case("patch14", "t1", 35, 150, 110, PATCH_14),
    Case("patch14-full", "t1", 36, 500, 230, PATCH_14 | {"max_image_tokens": 24}),
    Case("head64", "t1", 37, 90, 140, HEAD_64),
    Case("squeezed", "t1", 38, 400, 50, {"max_wh_ratio": 2.0}),
)
# (name, vision section) whose grids are tabulated
GEOMETRIES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("release", {"patch_size": 14, "max_image_tokens": 1024, "min_pixels": 544 * 544}),
    ("tiny", {}),
    (
        "ratio8",
        {**PATCH_14, "max_image_tokens": 384, "min_pixels": 384 * 384, "max_wh_ratio": 8.0},
    ),
)


def config_of(name: str, changes: dict[str, Any]) -> ModelConfig:
    config = ModelConfig.load(name)
    assert config.vision is not None
    return dataclasses.replace(config, vision=dataclasses.replace(config.vision, **changes))


def their_config(config: ModelConfig) -> Any:
    from nemo_automodel.components.models.deepseek_v41 import config as nemo_config

    v = config.vision
    assert isinstance(v, VisionConfig)
    vision = dataclasses.asdict(v) | {"downsample_ratio": v.downsample}
    del vision["downsample"], vision["rms_norm_eps"]
    assert v.rms_norm_eps == 1e-6, "a constant over there"
    return nemo_config.DeepseekV41Config(
        text_config={"hidden_size": config.hidden_size, "dtype": "float32"},
        vision_config=vision,
        image_token_id=IMAGE_TOKEN,
        dtype="float32",
    )


def picture(case: Case) -> NDArray[np.uint8]:
    """Bars and noise: no symmetry, every level."""
    rng = np.random.default_rng(case.seed)
    y, x = np.mgrid[: case.height, : case.width]
    waves = [np.sin(x / (5 + c)) + np.cos(y / (7 - c)) for c in range(3)]
    noise = rng.normal(0, 30, (case.height, case.width, 3))
    return (128 + 55 * np.stack(waves, -1) + noise).clip(0, 255).astype(np.uint8)


def modules(config: ModelConfig, theirs: Any, seed: int) -> SimpleNamespace:
    """What the program's `_image_embeddings` needs of its model, with our weights."""
    from nemo_automodel.components.models.deepseek_v41 import vision as nemo_vision

    tensors = random_vision_tensors(config, seed)
    used = {name for name in tensors if name.startswith("image_")}
    parts: dict[str, Any] = {name: tensors[name] for name in used}
    parts["vision"] = nemo_vision.DeepseekV41VisionTransformer(theirs)
    parts["aligner"] = nemo_vision.DeepseekV41VisionAligner(theirs)
    for part in ("vision", "aligner"):
        for name, target in parts[part].state_dict().items():
            value = tensors[f"{part}.{name}"]
            assert target.shape == value.shape and target.dtype == torch.float32, name
            target.copy_(value)
            used.add(f"{part}.{name}")
    assert used == set(tensors), sorted(set(tensors) - used)
    embed = torch.nn.Embedding(8, config.hidden_size)
    return SimpleNamespace(
        embed_tokens=embed,
        image_token_id=IMAGE_TOKEN,
        vision_config=theirs.vision_config,
        **parts,
    )


def run(case: Case) -> dict[str, NDArray[Any]]:
    from nemo_automodel.components.models.deepseek_v41 import model, processing

    config = config_of(case.config, case.changes)
    theirs = their_config(config)
    processor = SimpleNamespace(
        config=theirs,
        tokenizer=lambda texts, **_: {"input_ids": [[TEXT_TOKEN, IMAGE_TOKEN, TEXT_TOKEN]]},
    )
    batch = processing.DeepseekV41Processor.__call__(
        processor, ["a<image>b"], [Image.fromarray(picture(case))], return_tensors="pt"
    )
    levels = ((torch.arange(256) / 255 - 0.5) / 0.5).to(torch.bfloat16)
    assert len(levels.unique()) == 256
    patches = torch.searchsorted(levels.float(), batch["pixel_values"].float())
    assert torch.equal(levels[patches], batch["pixel_values"])
    exact = ((patches.float() / 255) - 0.5) / 0.5
    with torch.no_grad():
        embedded = model.DeepseekV41Model._image_embeddings(
            modules(config, theirs, case.seed),
            batch["input_ids"],
            exact,
            batch["image_grid_hws"],
            batch["vision_token_types"],
        )
    (rows, cols), p = batch["image_grid_hws"][0].tolist(), theirs.vision_config.patch_size
    again = processing._plan_image_grid(cols * p, rows * p, theirs.vision_config)
    assert (again.width, again.height) == (cols * p, rows * p), "its planner makes one pass only"
    pixels = patches.view(rows, cols, 3, p, p).permute(0, 3, 1, 4, 2).reshape(rows * p, cols * p, 3)
    span = embedded[0, 1:-1].numpy()
    print(case.name, pixels.shape, span.shape, float(span.std()))
    return {"pixels": pixels.numpy().astype(np.uint8), "rows": span}


def settled_grids(changes: dict[str, Any]) -> NDArray[np.int32]:
    """Lines (width, height, resized width, resized height, cell columns, cell rows)."""
    from nemo_automodel.components.models.deepseek_v41 import processing

    vision = their_config(config_of("t1", changes)).vision_config
    rng, lines = np.random.default_rng(5), []
    for index in range(400):
        high = 7.0 if index % 2 else 9.5
        width, height = (int(math.exp(v)) for v in rng.uniform(0, high, 2))
        grid = processing._plan_image_grid(width, height, vision)
        while True:
            again = processing._plan_image_grid(grid.width, grid.height, vision)
            if again == grid:
                break
            grid = again
        lines.append((width, height, grid.width, grid.height, grid.llm_width, grid.llm_height))
    return np.array(lines, dtype=np.int32)


def main() -> None:
    from importlib.metadata import version

    assert version("nemo-automodel") == NEMO_VERSION
    torch.set_num_threads(1)
    out: dict[str, NDArray[Any]] = {}
    for case in CASES:
        out |= {f"{case.name}/{key}": value for key, value in run(case).items()}
    for name, changes in GEOMETRIES:
        out[f"grids/{name}"] = settled_grids(changes)
    np.savez_compressed(FIXTURE, **out)
    print(FIXTURE.stat().st_size, "bytes")


if __name__ == "__main__":
    main()
