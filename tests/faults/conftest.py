"""What scenarios share: the framework as `kinds`, the proxy, and whole services to break."""

from __future__ import annotations

import functools
from collections.abc import AsyncIterator, Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import pytest_asyncio
from headrace_tests import module

from headrace.core.request import HandoffMode

whole, flow = module("tests/flow/conftest.py"), module("tests/flow/roles/conftest.py")
# Fixtures of tests/flow, which pytest finds by their names in this file.
run_dir, valkey, token, prompt = whole.run_dir, whole.valkey, whole.token, whole.prompt
yardstick, no_faults, router_end = whole.yardstick, whole.no_faults, whole.router_end
role_settings, store_settings = flow.role_settings, flow.store_settings
cluster_with_store_process = flow.cluster_with_store_process


@pytest.fixture(scope="session")
def kinds() -> ModuleType:
    """The module scenario.py: `kinds.Scenario`, `kinds.Fault`, `kinds.kill` and the others."""
    return module("tests/faults/scenario.py")


@pytest.fixture(scope="session")
def serving() -> Any:
    """`async with serving(role, salts, model) as (router, http)`: one more router; service.py."""
    return module("tests/faults/service.py").serving


@pytest.fixture(scope="session")
def proxy() -> ModuleType:
    """The module wire/proxy.py: rules and deeds for frames."""
    return module("tests/faults/wire/proxy.py")


@pytest.fixture(scope="session")
def router_rig() -> ModuleType:
    """tests/router/conftest.py: a router with scripted replicas."""
    return module("tests/router/conftest.py")


@pytest.fixture(scope="session")
def samples() -> ModuleType:
    """The module wire/samples.py: healthy messages and how to spoil them."""
    return module("tests/faults/wire/samples.py")


@pytest.fixture(scope="session")
def model() -> SimpleNamespace:
    """`model.world` and `model.steps`: the hand-off as a world of single steps."""
    module("tests/faults/model/prefilling.py")  # a part of the world, which imports it
    return SimpleNamespace(
        world=module("tests/faults/model/world.py"), steps=module("tests/faults/model/steps.py")
    )


@pytest.fixture(scope="module")
def mode() -> str:
    """The hand-off mode of a module's service; a module may ask for several."""
    return "exact"


@pytest.fixture(scope="module")
def tag(request: pytest.FixtureRequest, mode: str) -> str:
    """Names the store of a module in a mode."""
    return f"{request.module.__name__.rsplit('_', 1)[-1][:10]}-{mode[0]}"


@pytest.fixture(scope="module")
def roles(
    request: pytest.FixtureRequest,
    role_settings: Callable[..., Any],
    yardstick: Any,
    mode: str,
    tag: str,
) -> Callable[..., Any]:
    """Settings of a role by its name. The module may name more of its deployment in DEPLOYMENT.

    In mode `replay` the depth is the exact one, so that one text is right whatever was found."""
    options = {"handoff_mode": HandoffMode(mode), "local_prefill_rows": 0}
    if mode == "replay":
        options["replay_depth_tokens"] = yardstick.geometry.replay_rows
    options |= getattr(request.module, "DEPLOYMENT", {})
    return functools.partial(role_settings, tag=tag, model=yardstick.model, **options)


@pytest.fixture(scope="module")
def salts(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The folder of the salt that all routers of a module share, as one cluster's must."""
    return str(tmp_path_factory.mktemp("salt"))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def service(
    request: pytest.FixtureRequest,
    roles: Callable[..., Any],
    store_settings: Callable[..., Any],
    yardstick: Any,
    router_end: Any,
    tag: str,
    proxy: ModuleType,
    salts: str,
) -> AsyncIterator[Any]:
    """A service for the tests of a module, which must leave it as `pulse` wants it. The module may
    name settings of its router in ROUTER and of its store in STORE."""
    sizes = {"state_bytes": 65536} | getattr(request.module, "STORE", {})
    settings = store_settings(tag, **sizes)
    options = getattr(request.module, "ROUTER", {})
    running = module("tests/faults/service.py").running
    async with running(
        flow, proxy, roles, settings, yardstick, router_end, salts, **options
    ) as made:
        yield made
