"""From a deployment's settings to a ready engine."""

from __future__ import annotations

import torch

from headrace.core.clock import SYSTEM_CLOCK, Clock
from headrace.core.deployment import Deployment
from headrace.engine.engine import Engine
from headrace.engine.settings import EngineSettings, Half
from headrace.model import Numerics, load_named


def resolve_numerics(numerics: str, device: str) -> Numerics:
    """`auto` is invariant on CPU and fast elsewhere. Raises `ValueError` for another word."""
    if numerics == "auto":
        return Numerics.INVARIANT if torch.device(device).type == "cpu" else Numerics.FAST
    return Numerics(numerics)


def load_engine(
    deployment: Deployment,
    settings: EngineSettings,
    half: Half,
    *,
    clock: Clock = SYSTEM_CLOCK,
    poison: bool = False,
) -> Engine:
    """Load the deployment's model and build an engine on it; seconds, not milliseconds.

    Raises `ConfigError` for an unknown model or a keep below its window."""
    numerics = resolve_numerics(deployment.numerics, deployment.device)
    trunk = load_named(deployment.model, deployment.seed, numerics, deployment.device)
    engine = Engine(
        trunk,
        settings,
        half,
        record_spacing_tokens=deployment.record_spacing_tokens,
        clock=clock,
        poison=poison,
    )
    engine.geometry.check_keep(deployment.keep_for(engine.geometry.window_tokens))
    return engine
