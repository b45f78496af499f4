"""From a deployment's settings to a ready engine."""

from __future__ import annotations

from headrace.core.clock import SYSTEM_CLOCK, Clock
from headrace.core.deployment import Deployment
from headrace.engine.engine import Engine
from headrace.engine.settings import EngineSettings, Half
from headrace.model import ServedModel, one_thread_on_cpu, resolve_numerics

__all__ = ["load_engine", "one_thread_on_cpu", "resolve_numerics"]


def load_engine(
    deployment: Deployment,
    settings: EngineSettings,
    half: Half,
    *,
    clock: Clock = SYSTEM_CLOCK,
    poison: bool = False,
) -> Engine:
    """Load the deployment's model and build an engine on it; seconds, not milliseconds.

    Half.ENCODER loads the encoder half alone, and its slots have no rings of decoder layers; a
    model without a decoder half (V4) is loaded whole.
    Raises `ConfigError` for an unknown model or a keep below its window, and what is wrong with a
    checkpoint."""
    served = ServedModel(deployment)
    has_decoder_half = served.config().n_decoder_layers > 0
    numerics = resolve_numerics(deployment.numerics, deployment.device)
    encoder_only = half is Half.ENCODER and has_decoder_half
    trunk = served.trunk(numerics, deployment.device, encoder_only=encoder_only)
    engine = Engine(
        trunk,
        settings,
        half,
        record_spacing_tokens=deployment.record_spacing_tokens,
        clock=clock,
        poison=poison,
    )
    engine.geometry.check_keep(deployment.keep_for(engine.geometry))
    return engine
