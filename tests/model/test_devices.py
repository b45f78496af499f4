"""bfloat16 activations, and the same rows on a GPU."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from headrace.model import ConfigError, KvState, ModelConfig, Numerics, StateError, Trunk

needs_gpu = pytest.mark.gpu


def on(device, numerics, compute_dtype=None, name="t1"):
    config = ModelConfig.load(name)
    return Trunk.random(config, 1, numerics, device, compute_dtype=compute_dtype)


def short_run(trunk, driver_type, part_type, make_text, n=24):
    text = make_text(n, 4, trunk.config)
    driver = driver_type(trunk)
    part = part_type(text, 0, n, 0, (0, 1, 2), logits_from=0)
    return driver, driver.call(part).logits.cpu()


def test_bfloat16_activations_stay_near_float32(driver_type, part_type, make_text):
    """Rounding moves quantiser codes, so only nearness is claimed."""
    runs = [
        short_run(on("cpu", Numerics.FAST, d), driver_type, part_type, make_text)[1]
        for d in (torch.float32, torch.bfloat16)
    ]
    assert runs[1].dtype == torch.float32
    correlation = np.corrcoef(runs[0].flatten().numpy(), runs[1].flatten().numpy())[0, 1]
    assert correlation > 0.9
    assert not torch.equal(*runs)


def test_compute_dtypes_that_break_a_promise_are_refused():
    with pytest.raises(ConfigError, match="float64"):
        on("cpu", Numerics.INVARIANT, torch.float32)
    with pytest.raises(ConfigError, match="bfloat16"):
        on("cpu", Numerics.FAST, torch.float16)


@needs_gpu
@pytest.mark.parametrize("name", ["t1", "t2", "toy"])
def test_invariant_bits_do_not_depend_on_the_device(name, driver_type, part_type, make_text):
    """float64 noise of another device dies in the quantisers and on the logit grid."""
    results = []
    for device in ("cpu", "cuda"):
        trunk = on(device, Numerics.INVARIANT, name=name)
        text = make_text(301, 5, trunk.config)
        driver = driver_type(trunk)
        part = part_type(text, 0, 301, 1, (4, 0, 2), logits_from=290)
        logits = driver.run(part, [200, 1, 7, 93]).logits.cpu()
        assert not logits.isnan().any()
        blocks = [driver.state.read_block(b) for b in (4, 0)]
        results.append((logits, blocks, driver.state.export_slot(1, 301).swa))
    assert torch.equal(results[0][0], results[1][0])
    assert results[0][1:] == results[1][1:]


@needs_gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fast_runs_on_a_gpu(dtype, driver_type, part_type, make_text):
    _, cpu = short_run(on("cpu", Numerics.FAST), driver_type, part_type, make_text)
    driver, gpu = short_run(on("cuda", Numerics.FAST, dtype), driver_type, part_type, make_text)
    correlation = np.corrcoef(cpu.flatten().numpy(), gpu.flatten().numpy())[0, 1]
    assert correlation > 0.9
    with pytest.raises(StateError, match="block_view"):
        driver.state.block_view(0)
    cpu_state = KvState(driver.trunk.config, driver.layout, 1, 1, Numerics.FAST)
    with pytest.raises(StateError, match="cuda"):
        driver.trunk.forward(_one_row(driver, part_type, make_text), cpu_state)


def _one_row(driver, part_type, make_text):
    return driver.batch([part_type(make_text(4, 1, driver.trunk.config), 0, 1, 0, (0,))])
