"""The cluster file: what is read, and that every refusal names key, bound and value."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from headrace.cluster.config import ClusterConfig, Processes, keep_copy, load_config, read_config
from headrace.cluster.rundir import RunDir
from headrace.core.card import Role
from headrace.core.errors import ConfigError, HeadraceError
from headrace.model import CacheLayout, ModelConfig

REFUSED = {
    "unknown key": ("colour: red", "unknown key colour"),
    "unknown nested key": ("pools: {speech: 1}", "unknown key pools.speech"),
    "unknown deep key": ("deployment: {wire: {speed: 1}}", "unknown key deployment.wire.speed"),
    "wrong type": ("pools: {decode: two}", "pools.decode must be an integer, got str 'two'"),
    "a bool is no integer": ("pools: {decode: true}", "pools.decode must be an integer"),
    "a fraction is no integer": ("pools: {decode: 1.5}", "pools.decode must be an integer"),
    "nan": ("times: {drain_s: .nan}", "times.drain_s must be a finite number"),
    "below": ("pools: {decode: 0}", "decode must be between 1 and 64, got 0"),
    "above": ("pools: {prefill: 65}", "prefill must be between 0 and 64, got 65"),
    "negative": (
        "deployment: {keep_tokens: -1}",
        "deployment: keep_tokens must be an integer of at least 0, got -1",
    ),
    "spacing": (
        "deployment: {record_spacing_tokens: 200}",
        "record_spacing_tokens must be a multiple of 128, got 200",
    ),
    "depth": ("deployment: {replay_depth_tokens: -1}", "replay_depth_tokens must be an integer"),
    "depth of a mode that has none": (
        "deployment: {replay_depth_tokens: 64}",
        "deployment: replay_depth_tokens must be 0 in handoff_mode exact: only replay has a depth,"
        " got 64",
    ),
    "depth of mode state": (
        "deployment: {handoff_mode: state, replay_depth_tokens: 64}",
        "replay_depth_tokens must be 0 in handoff_mode state: only replay has a depth, got 64",
    ),
    "mode that does not exist": ("deployment: {handoff_mode: magic}", "must be one of exact"),
    "no mapping": ("router: 8000", "router must be a mapping, got int 8000"),
    "list": ("- 1", "x.yaml must hold a mapping of keys, got a list"),
    "empty": ("", "x.yaml must hold a mapping of keys, got nothing"),
    "not YAML": ("a: [", "x.yaml is no valid YAML in line 1"),
    "object": ("a: !!python/object:os.system {}", "x.yaml is no valid YAML"),
    "twice": ("cluster: a\ncluster: b", "'cluster' stands twice, again in line 2"),
    "twice, nested": ("pools:\n  decode: 1\n  decode: 2", "'decode' stands twice"),
    "name": ("cluster: ../up", "a name has 1 to 32"),
    "no key": ("keys: []", "keys must name at least one tenant"),
    "short key": ("keys: [{tenant: a, key: abc}]", "at least 16 characters, got 3"),
    "same key": (
        "keys: [{tenant: a, key: 0123456789abcdef}, {tenant: b, key: 0123456789abcdef}]",
        "the same key stands twice",
    ),
    "two generated keys": ("keys: [{tenant: a}, {tenant: a}]", "at most one generated key"),
    "tenant missing": ("keys: [{domain: a}]", "tenant"),
    "key that is a list": ("[1, 2]: 3", "x.yaml: a key must be plain text, in line 1"),
    "key that is a mapping": ("? {a: 1}\n: 3", "x.yaml: a key must be plain text, in line 1"),
    "a date that is none": ("cluster: 2020-13-45", "x.yaml holds a value that is none"),
    "deep": (f"a: {'[' * 20_000}", "x.yaml is nested too deeply"),
    "deep and closed": (f"a: {'[' * 5000}{']' * 5000}", "x.yaml is nested too deeply"),
    "holds itself": ("a: &x [*x]", "x.yaml is nested too deeply, or holds itself"),
    "domain": ('keys: [{tenant: a, domain: "a b"}]', "keys[0]: domain must have at most 64"),
    "domain, surrogate": ('keys: [{tenant: a, domain: "\\ud800"}]', "domain must have at most 64"),
    "domain, long": (f"keys: [{{tenant: a, domain: {'x' * 65}}}]", "domain must have at most 64"),
    "seed": ("deployment: {seed: -1}", "deployment: seed must be an integer between 0 and"),
    "seed, large": (f"deployment: {{seed: {2**63}}}", f"{2**63 - 1}, got {2**63}"),
    "frame": (
        "deployment: {wire: {frame_bytes: 1000}}",
        "deployment: wire.frame_bytes must be at least 1048576, got 1000",
    ),
    "lease": ("deployment: {leases: {handoff_s: 0}}", "leases.handoff_s must be above 0"),
    "lease below its beat": (
        "deployment: {leases: {member_s: 1, member_beat_s: 1}}",
        "deployment: leases.member_s must be above leases.member_beat_s (1.0)",
    ),
    "redis": ("redis: {url: 'http://x'}", "url must begin with one of redis://, rediss://"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_with_its_reason(case: str) -> None:
    text, reason = REFUSED[case]
    with pytest.raises(ConfigError) as refused:
        read_config(text, "x.yaml")
    assert reason in refused.value.message


LATE = {
    "engine": ("engine: {n_slots: 0}", "engine: n_slots must be an integer between 1"),
    "engine key": ("engine: {cache: 1}", "unknown key engine.cache"),
    "store": ("store: {arena_bytes: -5}", "store: arena_bytes must be an integer of at least 1"),
    "arena for no object": (
        "store: {arena_bytes: 1000}",
        "arena_bytes must be at least",
    ),
    "arena for no hand-off": (
        "engine: {n_blocks: 40}\nstore: {arena_bytes: 250000}",
        "for the hand-off of a prompt of 40 blocks, the longest that engine.n_blocks,"
        " deployment.edge.prompt_tokens and the model allow, got 250000 with room for ",
    ),
    "what the model decides": ("store: {block_bytes: 5}", "unknown key store.block_bytes"),
    "router": ("router: {port: 70000}", "router: port must lie between 0 and 65535, got 70000"),
    "keep without a decoder half": (
        "deployment: {model: v4-toy, keep_tokens: 44}",
        "keep_tokens must be 1 for a model without a decoder half (0 in a configuration), got 44",
    ),
    "no image tower": (
        "deployment: {model: v4-toy}\npools: {vision: 1}",
        "pools.vision must be 0 for v4-toy, which has no image tower, got 1",
    ),
    "keep": (
        "deployment: {keep_tokens: 127}",
        "deployment.keep_tokens must be 0 or at least 128, the window of t2, got 127",
    ),
    "blocks": ("engine: {n_blocks: 3}", "engine.n_blocks must be at least 4 for a keep of 140"),
    "device": ("deployment: {device: gpu}", "deployment.device must be cpu, cuda or cuda:N"),
    "device that is not there": ("deployment: {device: 'cuda:99'}", "cuda:99 is not there"),
    "tokenizer": ("router: {tokenizer: none}", "router.tokenizer must be a packaged name"),
    "tokenizer of another model": (
        "deployment: {model: toy}\nrouter: {tokenizer: tokenizer-4096}",
        "router.tokenizer must have at most 1024 ids, those of toy, got tokenizer-4096 with 4096",
    ),
    "tokenizer of fewer ids": (
        "router: {tokenizer: tokenizer-1024}",
        "router.tokenizer must be that of t2, tokenizer-4096 (SHA-256 ",
    ),
    "model that nobody knows": (
        "deployment: {model: t3}",
        "deployment.model must be one of demo, flash, t1, t2, toy, v4-flash, v4-toy or the absolute"
        " path of a configuration's .json file; a folder of weights is deployment.checkpoint",
    ),
    "model by a relative path": (
        "deployment: {model: ./weights}",
        "and deployment.model then its name; got './weights'",
    ),
    "a package's name for other weights": (
        "deployment: {model: demo, checkpoint: /nowhere}",
        "deployment.model must be a name of its own with deployment.checkpoint, none of the"
        " package's demo, flash, t1, t2, toy, v4-flash, v4-toy, got 'demo'",
    ),
    "checkpoint that is not there": (
        "deployment: {model: mine, checkpoint: /nowhere}",
        "deployment.checkpoint must be a folder, got '/nowhere'",
    ),
    "packed random weights": (
        "deployment: {weights: packed}",
        "deployment.weights must be widened for random weights, got 'packed'",
    ),
    "mapped random tables": (
        "deployment: {engram: mapped}",
        "deployment.engram_directory must name a folder",
    ),
    "router keys": ("router: {keys: []}", "unknown key router.keys"),
    "fetch key": ("router: {fetch: {ports: [81]}}", "unknown key router.fetch.ports"),
    "fetch type": ("router: {fetch: {hosts: a.example}}", "router.fetch.hosts must be a list"),
    "fetch host": (
        "router: {fetch: {hosts: ['10.0.0.1']}}",
        "router.fetch: hosts must hold names in lower case, *.name or *, got '10.0.0.1'",
    ),
    "fetch bound": (
        "router: {fetch: {max_bytes: 0}}",
        "router.fetch: max_bytes must lie between 1 and 1073741824, got 0",
    ),
}


@pytest.mark.parametrize("case", LATE)
def test_sections_of_other_rooms(case: str, tmp_path: Path) -> None:
    text, reason = LATE[case]
    run = RunDir(tmp_path, "local")
    run.create()
    config = read_config(text, "x.yaml")
    with pytest.raises(ConfigError) as refused:
        config.check(run)
    assert reason in refused.value.message


def test_a_key_never_shows_in_a_message_or_repr() -> None:
    secret = "0123456789abcdef-secret"
    config = read_config(f"keys: [{{tenant: a, key: {secret}}}]", "x.yaml")
    assert config.keys[0].key == secret
    assert secret not in repr(config)
    with pytest.raises(ConfigError) as refused:
        read_config(f"keys: [{{tenant: a, key: {secret}}}, {{tenant: b, key: {secret}}}]", "x.yaml")
    assert secret not in refused.value.message


@pytest.mark.parametrize("name", ["local", "one-process"])
def test_shipped_files(name: str, root: Path, tmp_path: Path) -> None:
    config = load_config(root / "configs" / "cluster" / f"{name}.yaml")
    run = RunDir(tmp_path, config.cluster)
    run.create()
    config.check(run)
    assert config.cluster == name
    assert config.deployment.model == "demo"
    router = config.router_settings(run)
    assert (router.host, router.port) == ("127.0.0.1", 8000)
    counts = {role: sum(r is role for r, _ in config.expected_roles()) for role in Role}
    assert counts[Role.STORE] == counts[Role.ROUTER] == counts[Role.PREFILL] == 1
    wanted = {"local": (Processes.RAY, 2), "one-process": (Processes.ONE, 1)}[name]
    assert (config.processes, counts[Role.DECODE]) == wanted


def test_the_store_is_told_the_sizes_of_the_model(tmp_path: Path) -> None:
    run = RunDir(tmp_path, "local")
    for model in ("t1", "t2"):
        layout = CacheLayout.of(ModelConfig.load(model))
        settings = read_config(f"deployment: {{model: {model}}}", "x").store_settings(run)
        assert settings.block_bytes == layout.block_bytes
        assert settings.window_bytes == layout.window_record_bytes
        assert settings.directory == str(tmp_path / "local" / "store")


def test_a_store_process_needs_no_torch_once_the_sizes_are_kept(tmp_path: Path) -> None:
    run = RunDir(tmp_path, "local")
    run.create()
    config = read_config("deployment: {model: t1}", "x")
    config.check(run)
    code = (
        "import sys; from pathlib import Path\n"
        "from headrace.cluster.config import read_config\n"
        "from headrace.cluster.rundir import RunDir\n"
        "config = read_config(f'deployment: {{model: {sys.argv[2]}}}', 'x')\n"
        "print(config.store_settings(RunDir(Path(sys.argv[1]), 'local')).block_bytes)\n"
        "print('torch' in sys.modules)"
    )
    for model, torch in (("t1", "False"), ("toy", "True")):  # kept for t1 only
        command = [sys.executable, "-c", code, str(tmp_path), model]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        layout = CacheLayout.of(ModelConfig.load(model))
        assert done.stdout.split() == [str(layout.block_bytes), torch]


def test_generated_keys_are_kept_and_private(tmp_path: Path) -> None:
    run = RunDir(tmp_path, "local")
    run.create()
    config = read_config(
        "keys: [{tenant: a}, {tenant: b}, {tenant: c, key: 0123456789abcdef}]", "x"
    )
    first = config.api_keys(run)
    assert len({entry.key for entry in first}) == 3
    assert config.api_keys(run) == first
    assert first[0].key == (tmp_path / "local" / "api_key").read_text()
    for name in ("api_key", "api_key-b"):
        assert (tmp_path / "local" / name).stat().st_mode & 0o777 == 0o600
    assert not (tmp_path / "local" / "api_key-c").exists()


def test_the_kept_copy_reads_back_under_the_new_name(root: Path, tmp_path: Path) -> None:
    source = root / "configs" / "cluster" / "local.yaml"
    config = load_config(source, cluster="other")
    run = RunDir(tmp_path, "other")
    run.create()
    keep_copy(source, config, run)
    assert load_config(run.config_file) == config == replace(load_config(source), cluster="other")
    assert run.config_file.stat().st_mode & 0o777 == 0o600


def test_a_port_of_the_command_line_reaches_the_router_and_the_kept_copy(
    root: Path, tmp_path: Path
) -> None:
    bare = tmp_path / "bare.yaml"
    bare.write_text("cluster: local\n")
    for source in (root / "configs" / "cluster" / "local.yaml", bare):
        config = load_config(source, cluster="other", port=8123)
        run = RunDir(tmp_path, "other")
        run.create()
        keep_copy(source, config, run)
        kept = load_config(run.config_file)
        assert kept == config
        assert kept.router == {**load_config(source).router, "port": 8123}
        assert kept.router_settings(run).port == 8123


def test_a_file_that_cannot_be_read_is_named_as_given(tmp_path: Path) -> None:
    (tmp_path / "latin.yaml").write_bytes(b"cluster: \xe4")
    (tmp_path / "list.yaml").write_text("- 1")
    for path, reason in (
        (Path("/nonexist.yaml"), "cannot read /nonexist.yaml: No such file or directory"),
        (tmp_path, f"cannot read {tmp_path}: Is a directory"),
        (tmp_path / "latin.yaml", f"cannot read {tmp_path}/latin.yaml: it is no UTF-8 text"),
        (tmp_path / "list.yaml", f"{tmp_path}/list.yaml must hold a mapping of keys, got a list"),
    ):
        with pytest.raises(ConfigError) as refused:
            load_config(path)
        assert refused.value.message == reason


def test_defaults_alone_are_a_configuration() -> None:
    assert read_config("cluster: local", "x.yaml") == ClusterConfig()


def test_a_checkpoint_gives_sizes_and_tokenizer(tmp_path: Path) -> None:
    """From its configuration and tokenizer alone: the leader's host needs no shard."""
    from headrace.model import CacheLayout, ModelConfig, package_tokenizer
    from headrace.model.checkpoint import Quantisation, ReleaseConfig, config_document

    model = ModelConfig.load("toy")
    folder, run = tmp_path / "weights", RunDir(tmp_path, "local")
    folder.mkdir()
    document = config_document(ReleaseConfig(model, Quantisation()))
    (folder / "config.json").write_text(json.dumps(document))
    package_tokenizer(model.vocab_size).save(str(folder / "tokenizer.json"))
    config = read_config(f"deployment: {{model: mine, checkpoint: {folder}}}", "x")
    run.create()
    config.check(run)
    assert config.router_settings(run).tokenizer == str(folder / "tokenizer.json")
    assert config.store_settings(run).block_bytes == CacheLayout.of(model).block_bytes
    own = json.loads((folder / "tokenizer.json").read_text())
    for name in ("tokenizer-4096", "tokenizer-1024"):
        other = replace(config, router={"tokenizer": name})
        if name == "tokenizer-1024":
            other.check(run)  # written otherwise, and the same tokenizer
            continue
        with pytest.raises(ConfigError, match="must have at most 1024 ids, those of mine"):
            other.check(run)
    merges = own["model"]["merges"]
    merges[0], merges[1] = merges[1], merges[0]
    (tmp_path / "other.json").write_text(json.dumps(own))
    mixed = replace(config, router={"tokenizer": str(tmp_path / "other.json")})
    with pytest.raises(ConfigError) as refused:
        mixed.check(run)
    assert f"router.tokenizer must be that of mine, {folder}/tokenizer.json" in str(refused.value)
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(HeadraceError, match=r"tokenizer\.json: cannot be read as a tokenizer"):
        mixed.check(run)
    # Sizes are kept by folder: the same name with other weights does not take them.
    assert run.read_sizes(str(folder)) is not None and run.read_sizes("mine") is None
    with pytest.raises(ConfigError, match="deployment: seed must be 0 with a checkpoint's weights"):
        read_config("deployment: {model: a, checkpoint: /weights, seed: 3}", "x")
    with pytest.raises(ConfigError, match="deployment: checkpoint must be an absolute path"):
        read_config("deployment: {checkpoint: weights}", "x")


def test_the_arena_that_is_asked_for_is_enough(tmp_path: Path) -> None:
    """The bytes that the refusal names are accepted, less one block is not; without prefill
    replicas nothing is handed over."""
    run = RunDir(tmp_path, "local")
    run.create()
    text = "engine: {n_blocks: 40}\nstore: {arena_bytes: %d}\n"
    with pytest.raises(ConfigError) as refused:
        read_config(text % 500_000, "x.yaml").check(run)
    found = re.search(r"at least (\d+) for the hand-off", refused.value.message)
    assert found is not None
    least = int(found[1])
    read_config(text % least, "x.yaml").check(run)
    with pytest.raises(ConfigError, match="for the hand-off of a prompt of 40 blocks"):
        read_config(text % (least - least // 40), "x.yaml").check(run)
    read_config(text % 500_000 + "pools: {prefill: 0}", "x.yaml").check(run)
