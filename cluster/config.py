"""The one YAML file that describes a cluster, read strictly into frozen dataclasses.

    cluster: local              name of the run: folder, Ray namespace, membership
    processes: ray              ray: one actor a role;  one: all roles in a single process
    listen_host: 127.0.0.1      where roles listen for each other
    deployment: {...}           core.deployment.Deployment: model, numerics, keep, hand-off, limits
    pools: {vision: 0, prefill: 1, decode: 2}
    engine: {...}               engine.EngineSettings, for both engine pools
    vision: {...}               vision.VisionSettings
    store: {...}                kvstore.StoreSettings without what the model decides
    redis: {url: ""}            "" starts an embedded server for this run alone
    router: {...}               router.RouterSettings without keys and folders
    keys: [{tenant: local}]     API keys: tenant, cache domain, and the key or "" to make one
    times: {...}                how long starting, draining and reviving may take

Every key has a default. Sections of other rooms are read by `check`, because knowing them means
importing torch; `load_config` alone is quick.
"""

from __future__ import annotations

import math
import re
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from headrace.cluster.reading import check_range, parse_yaml, read_record
from headrace.cluster.rundir import RunDir, SlotSizes, check_name, write_file
from headrace.core.card import Role
from headrace.core.chain import BLOCK_TOKENS
from headrace.core.deployment import Deployment
from headrace.core.errors import ConfigError
from headrace.core.link import parse_address
from headrace.core.request import HandoffMode
from headrace.core.rows import Geometry

if TYPE_CHECKING:
    from headrace.engine import EngineSettings
    from headrace.kvstore import StoreSettings
    from headrace.router import RouterSettings
    from headrace.vision import VisionSettings

Section = dict[str, Any]
MAX_REPLICAS = 64
DOMAIN = re.compile(r"[A-Za-z0-9._-]{1,64}")
ENGINE_POOLS = (Role.VISION, Role.PREFILL, Role.DECODE)
REDIS_SCHEMES = ("redis://", "rediss://", "unix://", "redis-sentinel://", "redis-cluster://")
STORE_DEFAULTS = {"arena_bytes": 256 << 20, "ssd_bytes": 512 << 20, "segment_bytes": 32 << 20}


class Processes(StrEnum):
    RAY = "ray"  # one actor a role
    ONE = "one"  # every role a task of the leader's own process, no Ray


@dataclass(frozen=True, slots=True)
class Pools:
    """Replicas of each kind. Without prefill replicas every prompt is run by decode, without vision
    replicas requests with pictures are refused."""

    vision: int = 0
    prefill: int = 1
    decode: int = 2

    def __post_init__(self) -> None:
        check_range("vision", self.vision, 0, MAX_REPLICAS)
        check_range("prefill", self.prefill, 0, MAX_REPLICAS)
        check_range("decode", self.decode, 1, MAX_REPLICAS)


@dataclass(frozen=True, slots=True)
class Redis:
    """`url` as redis-py takes it (redis://, rediss://, unix://), several servers as
    docs/kv-format.md tells; "" starts an embedded server."""

    url: str = ""

    def __post_init__(self) -> None:
        if self.url and not self.url.startswith(REDIS_SCHEMES):
            raise ConfigError(f"url must begin with one of {', '.join(REDIS_SCHEMES)}")


@dataclass(frozen=True, slots=True)
class KeyEntry:
    """Who may call, and which cache domain the caller's blocks belong to ("" = the tenant's own).

    `key` "" makes one at first start and keeps it in the run's folder, readable by its owner."""

    tenant: str
    domain: str = ""
    key: str = field(default="", repr=False)

    def __post_init__(self) -> None:
        check_name(self.tenant)
        if self.domain and not DOMAIN.fullmatch(self.domain):  # "" means the tenant's own
            raise ConfigError(
                "domain must have at most 64 of the characters A-Z a-z 0-9 . _ - or be empty,"
                f" got {ascii(self.domain)[:60]}"
            )
        if self.key and len(self.key) < 16:
            raise ConfigError(f"key must have at least 16 characters, got {len(self.key)}")


@dataclass(frozen=True, slots=True)
class Times:
    """Seconds. `restart_after_s`: a role that is missing from the membership for so long although
    its process lives (frozen, wedged) is killed, so that Ray brings it back."""

    ready_s: float = 180.0
    drain_s: float = 10.0
    restart_after_s: float = 20.0

    def __post_init__(self) -> None:
        check_range("ready_s", self.ready_s, 1, 3600)
        check_range("drain_s", self.drain_s, 0, 3600)
        check_range("restart_after_s", self.restart_after_s, 5, 3600)


@dataclass(frozen=True, slots=True)
class ClusterConfig:
    """The whole file. Sections typed `Section` are checked by `check`."""

    cluster: str = "local"
    processes: Processes = Processes.RAY
    listen_host: str = "127.0.0.1"
    deployment: Deployment = Deployment()
    pools: Pools = Pools()
    engine: Section = field(default_factory=dict)
    vision: Section = field(default_factory=dict)
    store: Section = field(default_factory=dict)
    redis: Redis = Redis()
    router: Section = field(default_factory=dict)
    keys: tuple[KeyEntry, ...] = (KeyEntry("local"),)
    times: Times = Times()

    def __post_init__(self) -> None:
        check_name(self.cluster)
        parse_address(f"tcp://{self.listen_host}:0")
        if not self.keys:
            raise ConfigError("keys must name at least one tenant: without a key nobody may call")
        tenants = [entry.tenant for entry in self.keys if not entry.key]
        if len(set(tenants)) != len(tenants):
            raise ConfigError("keys: a tenant has at most one generated key")
        given = [entry.key for entry in self.keys if entry.key]
        if len(set(given)) != len(given):
            raise ConfigError("keys: the same key stands twice")

    def expected_roles(self) -> tuple[tuple[Role, str], ...]:
        """(role, name) of every serving role, in the order in which they are started."""
        pools = {role: getattr(self.pools, role.value) for role in ENGINE_POOLS}
        engines = [(role, f"{role}-{i}") for role, count in pools.items() for i in range(count)]
        return ((Role.STORE, "store-0"), *engines, (Role.ROUTER, "router-0"))

    def engine_settings(self) -> EngineSettings:
        """Settings of every engine. Imports torch."""
        from headrace.engine import EngineSettings

        return read_record(EngineSettings, self.engine, "engine")

    def vision_settings(self) -> VisionSettings:
        """Settings of every vision replica. Imports torch."""
        from headrace.vision import VisionSettings

        return read_record(VisionSettings, self.vision, "vision")

    def store_settings(self, run: RunDir) -> StoreSettings:
        """Settings of the store; slot sizes as the leader wrote them down, or computed here.

        With a Redis of its own a cluster may have stores on several hosts: then each serves the
        others where its roles listen, unless `store.peer_listen` says otherwise ("": it does not).
        """
        from headrace.kvstore import StoreSettings

        sizes = run.read_sizes(self._weights_name) or self.slot_sizes()
        peers = {"peer_listen": self._peer_listen} if self.redis.url else {}
        values = {"directory": str(run.store_directory), **STORE_DEFAULTS, **peers, **self.store}
        return read_record(StoreSettings, values, "store", fixed=asdict(sizes))

    def slot_sizes(self) -> SlotSizes:
        """What the model says of the store's objects. Makes no weights, imports torch. Raises
        `ConfigError` if vision replicas are wanted for a model without an image tower."""
        from headrace.model import CacheLayout, ServedModel
        from headrace.model.slot_bytes import most_bytes
        from headrace.vision import largest_payload_bytes

        config = ServedModel(self.deployment).config()
        layout = CacheLayout.of(config)
        pictures = largest_payload_bytes(config, self.deployment) if self.pools.vision else 0
        hands_over = self.deployment.handoff_mode is HandoffMode.STATE
        states = most_bytes(layout) if hands_over else 0
        return SlotSizes(layout.block_bytes, layout.window_record_bytes, pictures, states)

    def router_settings(self, run: RunDir) -> RouterSettings:
        """Settings of every router, keys included."""
        from headrace.router import ApiKey, RouterSettings

        fixed: dict[str, object] = {
            "salt_directory": self.store.get("directory") or str(run.store_directory),
            "keys": tuple(ApiKey(k.key, k.tenant, k.domain) for k in self.api_keys(run)),
            "drain_s": self.times.drain_s,
            "images": self.pools.vision > 0,
        }
        values = {"tokenizer": self._tokenizer, **self.router}
        return read_record(RouterSettings, values, "router", fixed=fixed)

    @property
    def _peer_listen(self) -> str:
        host = f"[{self.listen_host}]" if ":" in self.listen_host else self.listen_host
        return "" if self.listen_host in ("0.0.0.0", "::") else f"tcp://{host}:0"

    @property
    def _tokenizer(self) -> str:
        """The router's where the file names none: the checkpoint's, or that of T1 and T2."""
        folder = self.deployment.checkpoint
        return str(Path(folder) / "tokenizer.json") if folder else "tokenizer-4096"

    @property
    def _weights_name(self) -> str:
        return self.deployment.checkpoint or self.deployment.model

    def check(self, run: RunDir) -> None:
        """Read the sections of other rooms too, make the generated keys, and write down the slot
        sizes, so that no store imports torch to know them. Raises `ConfigError` naming the key."""
        engine = self.engine_settings()
        self.vision_settings()
        check_device(self.deployment.device)
        self._check_model(engine)
        run.write_sizes(self._weights_name, self.slot_sizes())
        self._check_arena(self.store_settings(run), engine)
        self.router_settings(run)

    def _check_arena(self, store: StoreSettings, engine: EngineSettings) -> None:
        """A hand-off of the longest prompt must fit: all its blocks stay until decode has its first
        token."""
        from headrace.kvstore import Kind, plan_regions
        from headrace.model import ServedModel

        blocks = next(region for region in plan_regions(store) if region.kind is Kind.KV)
        most_tokens = ServedModel(self.deployment).config().max_position_embeddings
        most_tokens = min(self.deployment.edge.prompt_tokens, most_tokens)
        wanted = min(engine.n_blocks, most_tokens // BLOCK_TOKENS)
        if self.pools.prefill and blocks.slots < wanted:
            least = math.ceil(wanted * blocks.slot_bytes / store.share(Kind.KV))
            raise ConfigError(
                f"store.arena_bytes must be at least {least} for the hand-off of a prompt of"
                f" {wanted} blocks, the longest that engine.n_blocks, deployment.edge.prompt_tokens"
                f" and the model allow, got {store.arena_bytes} with room for {blocks.slots}"
            )

    def _check_model(self, engine: EngineSettings) -> None:
        """What is too small or too large for the served model."""
        from headrace.model import ServedModel
        from headrace.router.tokens import Vocabulary

        name, served = self.deployment.model, ServedModel(self.deployment)
        served.check(vision=self.pools.vision > 0)
        model = served.config()
        window = model.sliding_window
        geometry = Geometry(window, model.n_encoder_layers, model.n_decoder_layers)
        keep = self.deployment.keep_for(geometry)
        if geometry.has_decoder_half and keep < window:
            raise ConfigError(
                f"deployment.keep_tokens must be 0 or at least {window}, the window of {name},"
                f" got {keep}"
            )
        geometry.check_keep(keep)
        if self.pools.vision and model.vision is None:
            raise ConfigError(
                f"pools.vision must be 0 for {name}, which has no image tower,"
                f" got {self.pools.vision}"
            )
        least = -(-(keep + window) // BLOCK_TOKENS) + 1  # keep and window, and one to go on in
        if engine.n_blocks < least:
            raise ConfigError(
                f"engine.n_blocks must be at least {least} for a keep of {keep} and a window of"
                f" {window} tokens, got {engine.n_blocks}"
            )
        tokenizer = self.router.get("tokenizer", self._tokenizer)
        if isinstance(tokenizer, str):  # otherwise `router_settings` refuses it
            try:
                vocabulary = Vocabulary(tokenizer)
            except ConfigError as error:
                raise ConfigError(f"router.{error.message}") from None
            if (ids := vocabulary.size) > model.vocab_size:
                raise ConfigError(
                    f"router.tokenizer must have at most {model.vocab_size} ids, those of {name},"
                    f" got {tokenizer} with {ids}"
                )
            served.check_tokenizer(tokenizer, vocabulary.text)

    def api_keys(self, run: RunDir) -> tuple[KeyEntry, ...]:
        """All keys with their secrets; generated ones are made here if they are not there yet."""
        return tuple(
            entry if entry.key else replace(entry, key=run.api_key(entry.tenant, first=i == 0))
            for i, entry in enumerate(self.keys)
        )

    def redis_url(self, run: RunDir) -> str:
        """The configured Redis, or the run's embedded one."""
        return self.redis.url or f"unix://{run.valkey_socket}"


def check_weights(deployment: Deployment) -> None:
    """What takes no time of a deployment's weights: that there are such a model, folder or file.
    `check` looks into them. Raises `ConfigError`."""
    models = resources.files("headrace.configs") / "models"
    deployment.check_model_name(sorted(p.name.removesuffix(".json") for p in models.iterdir()))
    if deployment.checkpoint and not Path(deployment.checkpoint).is_dir():
        raise ConfigError(
            f"deployment.checkpoint must be a folder, got {deployment.checkpoint!r:.200}"
        )
    if deployment.model.startswith("/") and not Path(deployment.model).is_file():
        raise ConfigError(f"deployment.model must be a file, got {deployment.model!r:.200}")


def check_device(name: str) -> None:
    """Raises `ConfigError` when `deployment.device` is none of this machine's. Imports torch."""
    import torch

    try:
        device = torch.device(name)
    except RuntimeError:
        device = None
    if device is None or device.type not in ("cpu", "cuda"):
        raise ConfigError(f"deployment.device must be cpu, cuda or cuda:N, got {ascii(name)[:40]}")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ConfigError(
            f"deployment.device {name} is not there: this machine has"
            f" {torch.cuda.device_count()} CUDA devices"
        )


def read_config(text: str, name: str) -> ClusterConfig:
    """The configuration in a YAML text; `name` stands in messages. Raises `ConfigError`."""
    return read_record(ClusterConfig, parse_yaml(text, name), "")


def load_config(path: Path, *, cluster: str = "", port: int | None = None) -> ClusterConfig:
    """The configuration in a file, under another cluster name or router port if one is given.

    Raises `ConfigError` for a file that cannot be read, unknown keys, wrong types and bounds; the
    sections of other rooms wait for `check`."""
    try:
        text = path.read_text()
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"cannot read {path}: it is no UTF-8 text") from None
    config = read_config(text, str(path))
    if port is not None:
        config = replace(config, router={**config.router, "port": port})
    return replace(config, cluster=check_name(cluster)) if cluster else config


def keep_copy(config_path: Path, config: ClusterConfig, run: RunDir) -> None:
    """Write the run's own config.yaml, which its roles read: later edits of the original change
    nothing in a running cluster. May hold keys, so only its owner may read it."""
    values = parse_yaml(config_path.read_text(), str(config_path))
    values["cluster"] = config.cluster
    if config.router:
        values["router"] = config.router
    write_file(run.config_file, yaml.safe_dump(values, sort_keys=False))
