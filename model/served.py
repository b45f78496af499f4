"""The model of a deployment: a checkpoint, or seeded random weights of a configuration.

Whatever a role needs of it, and no more: a decode replica the whole text trunk, a prefill replica
its encoder half, a vision replica the image tower and the text model's name in the store.
"""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer

from headrace.core.deployment import Deployment
from headrace.model.checkpoint.errors import CheckpointError
from headrace.model.checkpoint.holdings import check_holds
from headrace.model.checkpoint.json_files import CONFIG_NAME, read_json
from headrace.model.checkpoint.load import TOKENIZER_NAME, load_trunk, load_vision, weights_id
from headrace.model.checkpoint.names import Selection
from headrace.model.checkpoint.progress import logged_progress
from headrace.model.checkpoint.reader import Checkpoint
from headrace.model.checkpoint.release import read_config
from headrace.model.config import ModelConfig, checkpoint_folder, package_models
from headrace.model.engram_store import Placement
from headrace.model.errors import ConfigError
from headrace.model.named import (
    load_named,
    load_named_vision,
    package_tokenizer,
    unspoken_token_ids,
)
from headrace.model.numerics import Numerics
from headrace.model.packed import Weights
from headrace.model.token_map import build_token_map
from headrace.model.trunk import Trunk
from headrace.model.vision import VisionTower


@dataclass(frozen=True, slots=True)
class ServedModel:
    """Reads files when asked; raises `CheckpointError` or `ConfigError` naming what is wrong.

    With `deployment.checkpoint` `model` is a name alone; `seed` is for random weights only."""

    deployment: Deployment

    def check(self, *, vision: bool = False) -> None:
        """Whether the deployment's keys say one thing about its weights, and a checkpoint's index
        has the text model, with `vision` the tower too; reads no weight. Raises `ConfigError`
        naming key, bound and value, `CheckpointError` for a folder without files or parts and for a
        file that its index and header do not fit."""
        d = self.deployment
        d.check_model_name(package_models())
        if d.checkpoint and not os.path.isdir(d.checkpoint):
            raise ConfigError(f"deployment.checkpoint must be a folder, got {d.checkpoint!r:.200}")
        config = self.config()
        if self.folder is not None:
            selections = [Selection.TEXT]
            if vision and config.vision is not None:
                selections.append(Selection.VISION)
            for selection in selections:
                check_holds(self.folder, selection)
                # A file that is damaged is no better at a role's second start than at its first.
                # A leader's host may have no shard: there the roles' hosts find out.
                if any(self.folder.glob("*.safetensors")):
                    Checkpoint.open(self.folder, selection).close()
            return
        if Weights(d.weights) is Weights.PACKED:
            raise ConfigError(
                f"deployment.weights must be widened for random weights, got {d.weights!r}"
            )
        if Placement(d.engram) is Placement.MAPPED and not d.engram_directory:
            raise ConfigError(
                "deployment.engram_directory must name a folder for the mapped tables of random"
                " weights, got ''"
            )

    def check_tokenizer(self, name: str, text: str) -> None:
        """Whether a tokenizer file's text is the model's. Raises `ConfigError`: with another the
        model would read other words than were said, and its answers would be garbled."""
        wanted, found = (
            hashlib.sha256(tokenizer.to_str().encode()).hexdigest()[:12]
            for tokenizer in (self.tokenizer(), Tokenizer.from_str(text))
        )
        if found != wanted:
            own = f"{self.folder}/{TOKENIZER_NAME}"
            if self.folder is None or not self.deployment.checkpoint:
                own = f"tokenizer-{self.config().vocab_size}"
            raise ConfigError(
                f"router.tokenizer must be that of {self.deployment.model}, {own} (SHA-256"
                f" {wanted}..), got {name} ({found}..)"
            )

    @property
    def folder(self) -> Path | None:
        """Where the weights lie; None for random ones."""
        if self.deployment.checkpoint:
            return Path(self.deployment.checkpoint)
        return checkpoint_folder(self.deployment.model)

    def config(self) -> ModelConfig:
        """The configuration; reads no weight."""
        if self.folder is None:
            return ModelConfig.load(self.deployment.model)
        return read_config(read_json(self.folder / CONFIG_NAME)).model

    def tokenizer(self) -> Tokenizer:
        if self.folder is None:
            return package_tokenizer(self.config().vocab_size)
        path = self.folder / TOKENIZER_NAME
        if not path.is_file():
            raise CheckpointError(f"{TOKENIZER_NAME}: missing from the checkpoint")
        try:
            return Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises no other
            raise CheckpointError(
                f"{TOKENIZER_NAME}: cannot be read as a tokenizer ({str(error)[:100]})"
            ) from None

    def trunk(
        self, numerics: Numerics, device: str | torch.device, *, encoder_only: bool = False
    ) -> Trunk:
        """The text trunk. A checkpoint is read weight by weight, and its progress logged."""
        d = self.deployment
        placement, weights = Placement(d.engram), Weights(d.weights)
        if self.folder is None:
            return load_named(
                d.model,
                d.seed,
                numerics,
                device,
                encoder_only=encoder_only,
                engram=placement,
                engram_directory=Path(d.engram_directory) if d.engram_directory else None,
                weights=weights,
            )
        silent = unspoken_token_ids(self.tokenizer(), self.config().eos_token_id)
        with logged_progress(f"weights of {d.model}") as report:
            return load_trunk(
                self.folder,
                numerics,
                device,
                silent,
                token_map=self._token_map(),
                encoder_only=encoder_only,
                engram=placement,
                weights=weights,
                on_progress=report,
            )

    def vision(self, numerics: Numerics, device: str | torch.device) -> tuple[VisionTower, str]:
        """The image tower, and the weights id of the text trunk, of which nothing is read."""
        d = self.deployment
        if self.folder is None:
            return load_named_vision(d.model, d.seed, numerics, device)
        with logged_progress(f"image tower of {d.model}") as report:
            tower = load_vision(self.folder, numerics, device, on_progress=report)
        return tower, weights_id(self.folder, self._token_map())

    def _token_map(self) -> NDArray[np.int64]:
        if not self.config().engram_layer_ids:
            return np.zeros(0, dtype=np.int64)  # nothing reads it
        return build_token_map(self.tokenizer()).ids
