"""Every mistake in a manifest or a setting is one line that names the key, the value and what is allowed."""

from __future__ import annotations

import dataclasses
import json
import re
import tomllib
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given

from geo_diloco.config import (
    PeerConfig,
    is_loopback,
    load_manifest,
    load_peer_config,
    manifest_from_bytes,
    manifest_from_toml,
    manifest_template,
    peer_config_from,
    split_announce,
    state_root,
)
from geo_diloco.errors import ConfigError, ManifestError
from geo_diloco.manifest import WIRE_VERSION, CodecSpec, ModelSpec, PeerId, RunManifest

TEMPLATE = manifest_template()
ADDRESS = "/ip4/192.0.2.1/tcp/1/p2p/QmSoLnSGccFuZQJzRadHn95W2CrSFmZuTdDWP8HXaHca9z"


def changed(old: str, new: str) -> str:
    assert old in TEMPLATE, old
    return TEMPLATE.replace(old, new, 1)


def mistake_in(text: str) -> str:
    with pytest.raises(ManifestError) as caught:
        manifest_from_toml(text, source="run.toml")
    message = str(caught.value)
    assert "\n" not in message
    assert message.startswith("run.toml: ")
    return message.removeprefix("run.toml: ")


def founded() -> RunManifest:
    return dataclasses.replace(manifest_from_toml(TEMPLATE), founder=PeerId("ab" * 32), nonce="cd" * 16)


def as_peer_sends(changes: dict[str, Any]) -> bytes:
    values = json.loads(founded().canonical_bytes()) | changes
    return json.dumps(values, sort_keys=True, separators=(",", ":")).encode()


# ---- a person's manifest -----------------------------------------------------------------------------------------


def test_a_user_without_a_home_gets_no_folder_of_that_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("geo_diloco.config.peer.user_state_path", lambda name: Path("~/.local/state") / name)
    with pytest.raises(ConfigError, match="HOME is not set, and this user has none"):
        state_root()


def test_the_template_is_accepted_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text(TEMPLATE)
    manifest = load_manifest(path)
    assert (manifest.founder, manifest.nonce) == ("", "")
    assert (manifest.sync.interval_steps, manifest.sync.num_fragments, manifest.sync.overlap_steps) == (24, 4, 2)


def test_the_template_shows_every_key_and_its_default_unless_marked() -> None:
    shown = tomllib.loads(TEMPLATE)
    codec = shown.pop("codec")
    config = shown["model"].pop("config")
    defaults = json.loads(RunManifest().canonical_bytes())
    for key in ("founder", "nonce", "wire_version"):
        del defaults[key]
    for key in ("config", "factory", "factory_arguments", "pretrained"):
        del defaults["model"][key]
    assert config["model_type"] == "llama"
    assert shown.pop("stop") == defaults.pop("stop") | {"minutes": 10.0}
    assert shown.pop("sync") == defaults.pop("sync") | {"num_fragments": 4, "grace_gamma": 1.0}
    assert shown.pop("inner") == defaults.pop("inner") | {"learning_rate": 0.002}
    assert shown | {f"codec_{leg}": codec[leg] for leg in codec} == defaults


def test_the_template_is_the_demos_run_but_for_its_name_and_length() -> None:
    from geo_diloco.training.presets import demo_manifest

    demo, mine = demo_manifest(), manifest_from_toml(TEMPLATE)
    # TOML has no null: what the demo's config sets to None is left to the family's default, which bytes never use.
    assert demo.model.config is not None
    config = {key: value for key, value in demo.model.config.items() if value is not None}
    assert mine.model == dataclasses.replace(demo.model, config=config)
    assert dataclasses.replace(mine, name=demo.name, stop=demo.stop, model=demo.model) == demo


def test_an_empty_manifest_lacks_only_a_model() -> None:
    assert mistake_in("") == 'model = []; allowed is exactly one of "config", "factory", "pretrained"'
    manifest = manifest_from_toml('[model]\nfactory = "package.module:build"')
    assert manifest == RunManifest(model=ModelSpec(factory="package.module:build"))


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("quorum = 1", "quorum = 0", "sync.quorum = 0; allowed is a whole number from 1 to 1024"),
        ("quorum = 1", 'quorum = "1"', 'sync.quorum = "1"; allowed is a whole number from 1 to 1024'),
        ("quorum = 1", "quorum = 1.0", "sync.quorum = 1.0; allowed is a whole number from 1 to 1024"),
        ("quorum = 1", "quorum = true", "sync.quorum = true; allowed is a whole number from 1 to 1024"),
        ("grace = true", "grace = 1", "sync.grace = 1; allowed is true or false"),
        ("eta = 0.7", "eta = nan", "outer.eta = NaN; allowed is a number above 0.0 up to 10.0"),
        ("mu = 0.5", "mu = 1", "outer.mu = 1; allowed is a number from 0.0 to below 1.0"),
        ('merge = "rda"', 'merge = "sum"', 'sync.merge = "sum"; allowed is one of "rda", "rda-fragment", "mean"'),
        (
            'name = "run"',
            'name = "a\\u200bb"',
            'name = "a\\u200bb"; allowed is one line of 1 to 80 printable characters',
        ),
        ('name = "run"', 'name = ""', 'name = ""; allowed is one line of 1 to 80 printable characters'),
        ("block = 64", "block = 65", "codec.up.block = 65; allowed is a power of two from 16 to 4096"),
        (
            "up_choices = []",
            'up_choices = [{ name = "bf16" }, { block = 65 }]',
            "codec.up_choices[1].block = 65; allowed is a power of two from 16 to 4096",
        ),
        (
            "up_choices = []",
            'up_choices = [{ name = "int5" }]',
            'codec.up_choices[0] = "int5"; allowed is up to 8 codecs such as { name = "int8", block = 64 }: none, '
            "bf16, int8 or int4",
        ),
        ("0.95]", "1.0]", "inner.betas[1] = 1.0; allowed is a number that is at least 0 and below 1"),
        ("0.95]", '"x"]', 'inner.betas[1] = "x"; allowed is two numbers, each at least 0 and below 1'),
        (", 0.95]", "]", "inner.betas = [0.9]; allowed is two numbers, each at least 0 and below 1"),
    ],
)
def test_a_value_out_of_range_names_key_value_and_what_is_allowed(old: str, new: str, message: str) -> None:
    assert mistake_in(changed(old, new)) == message


@pytest.mark.parametrize(
    ("old", "new", "meant"),
    [
        ("quorum = 1", "quorm = 0", "sync.quorm = 0 is no known key; did you mean sync.quorum, a whole number"),
        ("[sync]", "[snyc]", "[snyc] is no known section; did you mean sync, a section with interval_steps"),
        ("[codec.up]", "[codec.upp]", "[codec.upp] is no known section; did you mean codec.up, a section with name"),
        ('admission = "open"', "quorum = 1", "quorum = 1 is no known key; did you mean sync.quorum, a whole number"),
        ("[model.config]", "[model.confg]", "[model.confg] is no known section; did you mean model.config, a table"),
    ],
)
def test_a_typo_in_a_key_names_the_key_that_was_meant(old: str, new: str, meant: str) -> None:
    assert mistake_in(changed(old, new)).startswith(meant)


def test_a_key_with_line_breaks_in_it_is_still_one_line() -> None:
    assert mistake_in(changed("[outer]", '[outer]\n"a\\nb" = 1')).startswith("outer.a?b = 1 is no known key")
    assert mistake_in(changed('model_type = "llama"', '"a\\nb" = 1979-05-27\nmodel_type = "llama"')).startswith(
        'model.config.a?b = "1979-05-27"; allowed is text'
    )


def test_an_unknown_key_like_no_other_lists_what_there_is() -> None:
    assert mistake_in(changed("[outer]", "[outer]\nzzz = 1")) == (
        "outer.zzz = 1 is no known key; allowed are outer.eta, outer.mu, outer.gain_max"
    )


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (
            "gain_max = 0.0",
            "gain_max = 0.5",
            "outer.gain_max = 0.5; allowed is 0 (no limit), or a number of at least 1",
        ),
        ("overlap_steps = 2", "overlap_steps = 24", "sync.overlap_steps = 24; allowed is less than sync."),
        ('schedule_by = "run"', 'schedule_by = "own"', 'inner.schedule_by = "own"; allowed is "own" only with a token'),
        ("sequence_length = 128", "sequence_length = 512", "data.sequence_length = 512; allowed is at most model."),
        ("vocab_size = 256", "vocab_size = 100", "model.config.vocab_size = 100; allowed is at least 256"),
        ('model_type = "llama"', "", "model.config.model_type = null; allowed is the name of an architecture"),
        ("[model]", '[model]\nfactory = "a:b"', 'model = ["config", "factory"]; allowed is exactly one of'),
        ("[model]", "[model]\nfactory_arguments = { a = 1 }", 'model.factory_arguments = {"a": 1}; allowed is nothing'),
        ("use_cache = false", "d = 2026-01-01", 'model.config.d = "2026-01-01"; allowed is text, finite numbers'),
        ("use_cache = false", "d = [inf]", "model.config.d[0] = Infinity; allowed is text, finite numbers"),
        ("use_cache = false", "trust_remote_code = true", "model.config.trust_remote_code = true; allowed is nothing"),
        ("use_cache = false", "auto_map = {}", "model.config.auto_map = {}; allowed is nothing"),
    ],
)
def test_values_that_do_not_go_together_are_named(old: str, new: str, message: str) -> None:
    assert mistake_in(changed(old, new)).startswith(message)


def test_lockstep_has_at_most_one_fragment_a_step() -> None:
    text = changed("lockstep = false", "lockstep = true")
    manifest_from_toml(text.replace("num_fragments = 4", "num_fragments = 24"))
    wanted = "sync.num_fragments = 25; allowed is at most sync.interval_steps (24) in lockstep"
    assert mistake_in(text.replace("num_fragments = 4", "num_fragments = 25")).startswith(wanted)


@pytest.mark.parametrize("key", ["founder", "nonce", "wire_version"])
def test_what_start_writes_is_not_a_persons_to_write(key: str) -> None:
    assert mistake_in(changed('admission = "open"', f"{key} = 1")) == (
        f"{key} = 1; nothing is allowed here, `start` writes it"
    )


def test_a_file_that_is_not_toml_names_the_place(tmp_path: Path) -> None:
    assert re.match(r"not TOML: .*line 4", mistake_in(changed('name = "run"', "name = run")))
    path = tmp_path / "run.toml"
    path.write_bytes(b"name = '\xff'")
    with pytest.raises(ManifestError, match="not UTF-8 text"):
        load_manifest(path)


def test_a_missing_file_says_how_to_make_one(tmp_path: Path) -> None:
    with pytest.raises(ManifestError, match=r"run\.toml: No such file.*geo-diloco init"):
        load_manifest(tmp_path / "run.toml")


def test_a_number_written_without_a_point_gives_the_same_run() -> None:
    assert manifest_from_toml(changed("eta = 0.7", "eta = 1")) == manifest_from_toml(changed("eta = 0.7", "eta = 1.0"))


# ---- a peer's manifest -------------------------------------------------------------------------------------------


def test_a_founded_manifest_comes_back_as_it_went() -> None:
    manifest = founded()
    again = manifest_from_bytes(manifest.canonical_bytes())
    assert again == manifest
    assert again.run_id() == manifest.run_id()


def test_the_line_of_choices_that_the_template_shows_is_taken() -> None:
    manifest = manifest_from_toml(
        changed("up_choices = []", "# up_choices = []").replace("# up_choices = [{", "up_choices = [{")
    )
    assert [each.name for each in manifest.codec_up_choices] == ["bf16", "int8", "int4"]
    assert manifest_from_toml(changed("", "")).codec_up_choices == ()


def test_in_lockstep_there_is_nothing_to_choose() -> None:
    text = changed("up_choices = []", 'up_choices = [{ name = "bf16" }]').replace("lockstep = false", "lockstep = true")
    assert mistake_in(text).startswith('codec.up_choices = ["bf16"]; allowed is nothing in lockstep')


def test_every_codec_leg_survives_the_way() -> None:
    up, down = CodecSpec(name="int8", block=256), CodecSpec(name="none")
    manifest = dataclasses.replace(founded(), codec_up=up, codec_up_choices=(down, up), codec_down=down)
    assert manifest_from_bytes(manifest.canonical_bytes()) == manifest


def test_a_pretrained_model_carries_its_config_once_founded() -> None:
    model = ModelSpec(config={"model_type": "llama"}, pretrained="folder")
    manifest = dataclasses.replace(founded(), model=model)
    assert manifest_from_bytes(manifest.canonical_bytes()).model == model


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"wire_version": 1}, f"wire_version = 1; this software speaks {WIRE_VERSION}"),
        ({"wire_version": True}, f"wire_version = true; this software speaks {WIRE_VERSION}"),
        ({"founder": "AB" * 32}, "founder = .*; allowed are 64 hexadecimal digits"),
        ({"nonce": ""}, 'nonce = ""; allowed are 32 hexadecimal digits'),
        ({"outer": {"eta": -1.0, "mu": 0.5}}, "outer.eta = -1.0; allowed is a number above 0.0 up to 10.0"),
        ({"surprise": 1}, "surprise = 1 is no known key"),
        ({"outer": {"eta": 1, "mu": 0.5}}, "not in canonical form"),
        ({"outer": {"eta": 0.7}}, "not in canonical form"),
    ],
)
def test_a_peers_manifest_is_refused_by_name_of_the_difference(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ManifestError, match=message):
        manifest_from_bytes(as_peer_sends(changes))


@pytest.mark.parametrize(
    "data", [b"", b"[]", b"{", b"null", b"\xff", b"[" * 200_000, b'{"a":' * 5_000, b" " * (2 << 20), b"{}"]
)
def test_bytes_that_are_no_manifest_are_refused_in_one_line(data: bytes) -> None:
    with pytest.raises(ManifestError) as caught:
        manifest_from_bytes(data)
    assert "\n" not in str(caught.value)


def test_a_manifest_with_spaces_is_another_manifest() -> None:
    spaced = json.dumps(json.loads(founded().canonical_bytes()), sort_keys=True).encode()
    with pytest.raises(ManifestError, match="not in canonical form"):
        manifest_from_bytes(spaced)


@given(st.data())
def test_no_json_value_in_a_manifest_causes_anything_but_a_manifest_error(data: st.DataObject) -> None:
    scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5)
    names = st.text(max_size=5)
    anything = st.recursive(scalars, lambda v: st.lists(v, max_size=3) | st.dictionaries(names, v, max_size=3))
    values = json.loads(founded().canonical_bytes())
    key = data.draw(st.sampled_from(sorted(values)))
    section = values[key]
    if isinstance(section, dict) and section and data.draw(st.booleans()):
        section[data.draw(st.sampled_from(sorted(section)))] = data.draw(anything)
    else:
        values[key] = data.draw(anything)
    sent = json.dumps(values, sort_keys=True, separators=(",", ":")).encode()
    try:
        accepted = manifest_from_bytes(sent)
    except ManifestError as exc:
        assert "\n" not in str(exc)
    else:
        assert accepted.canonical_bytes() == sent


# ---- this machine's settings -------------------------------------------------------------------------------------


def test_flags_win_over_the_environment_which_wins_over_a_file(tmp_path: Path) -> None:
    file = tmp_path / "peer.toml"
    file.write_text('port = 1\ndtype = "bfloat16"\nthreads = 1\n')
    environment = {"GEO_DILOCO_PORT": "2", "GEO_DILOCO_THREADS": "2", "UNRELATED": "x"}
    config = load_peer_config({"port": 3, "threads": None}, environment=environment, file=file)
    assert (config.port, config.threads, config.dtype) == (3, 2, "bfloat16")
    assert load_peer_config({}, environment={"GEO_DILOCO_CONFIG": str(file)}).port == 1


def test_without_any_setting_the_defaults_hold() -> None:
    assert load_peer_config({}, environment={}) == PeerConfig()


def test_the_directory_side_listens_where_the_http_side_does_unless_told() -> None:
    assert load_peer_config({"host": "0.0.0.0"}, environment={}).dht_host == "0.0.0.0"
    assert load_peer_config({"host": "0.0.0.0", "dht_host": "::1"}, environment={}).dht_host == "::1"


def test_the_environment_may_list_bootstraps_and_say_yes() -> None:
    peer = "QmYyQSo1c1Ym7orWxLYvCrM2EmxFTANf8wXmmE7DWjhx5N"
    bootstraps = (f"/ip4/192.0.2.1/tcp/1/p2p/{peer}", f"/dns/example.org/tcp/2/p2p/{peer}")
    environment = {"GEO_DILOCO_BOOTSTRAPS": ", ".join(bootstraps), "GEO_DILOCO_KEEP_CONTRIBUTIONS": "1"}
    config = load_peer_config({}, environment=environment)
    assert config.bootstraps == bootstraps
    assert config.keep_contributions


def test_a_home_folder_is_expanded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert load_peer_config({"data_dir": "~/texts"}, environment={}).data_dir == tmp_path / "texts"


@pytest.mark.parametrize(
    ("flags", "environment", "message"),
    [
        ({"port": 70_000}, {}, "--port = 70000; allowed is a whole number from 0 to 65535"),
        ({}, {"GEO_DILOCO_PORT": "x"}, 'GEO_DILOCO_PORT = "x"; allowed is a whole number from 0 to 65535'),
        ({}, {"GEO_DILOCO_PROT": "1"}, 'GEO_DILOCO_PROT = "1" is no known key; did you mean port, a whole number'),
        ({"device": "gpu"}, {}, '--device = "gpu"; allowed is "auto", "cpu", "cuda", "cuda:N" or "mps"'),
        ({"dtype": "float16"}, {}, '--dtype = "float16"; allowed is one of "float32", "bfloat16"'),
        ({"announce": "http://a"}, {}, '--announce = "http://a"; allowed is HOST or HOST:PORT'),
        ({"announce": "a:0"}, {}, '--announce = "a:0"; allowed is HOST or HOST:PORT'),
        ({"announce": "a:65536"}, {}, '--announce = "a:65536"; allowed is HOST or HOST:PORT'),
        ({"run_dir": "~nobody-here/x"}, {}, '--run-dir = "~nobody-here/x"; allowed is a path'),
        ({"bootstraps": ["/ip4/192.0.2.1/tcp/1"]}, {}, '--bootstrap = ["/ip4/192.0.2.1/tcp/1"]; allowed is up to 15'),
        ({"bootstraps": [ADDRESS] * 16}, {}, '--bootstrap = ["/ip4/192.0.2.1'),
        ({"bootstraps": ["192.0.2.1:1"]}, {}, '--bootstrap = ["192.0.2.1:1"]; allowed is up to 15 multiaddresses'),
        ({"pace_ms": -1}, {}, "--pace = -1; allowed is a whole number from 0 to 3600000"),
        ({}, {"GEO_DILOCO_PACE_MS": "1.5"}, 'GEO_DILOCO_PACE_MS = "1.5"; allowed is a whole number from 0 to 3600000'),
        ({"save_every_s": 0}, {}, "--save-every-s = 0; allowed is a number from 0.5 to 86400"),
    ],
)
def test_a_bad_setting_is_named_as_the_person_wrote_it(
    flags: dict[str, Any], environment: dict[str, str], message: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        load_peer_config(flags, environment=environment)
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)


def test_a_script_that_misspells_a_setting_is_told_so_and_hears_no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GEO_DILOCO_PORT", "1")
    assert peer_config_from({"threads": 2, "device": None}) == PeerConfig(threads=2)
    with pytest.raises(ConfigError, match=r"^treads = 1 is no known key; did you mean threads"):
        peer_config_from({"treads": 1})


@pytest.mark.parametrize(
    ("announce", "expected"),
    [
        ("", ("", 0)),
        ("example.org", ("example.org", 0)),
        ("example.org:80", ("example.org", 80)),
        ("[2001:db8::1]", ("2001:db8::1", 0)),
        ("[2001:db8::1]:80", ("2001:db8::1", 80)),
    ],
)
def test_an_announced_address_is_host_and_port(announce: str, expected: tuple[str, int]) -> None:
    assert split_announce(PeerConfig(announce=announce).announce) == expected


def test_a_bad_setting_in_a_file_names_the_file(tmp_path: Path) -> None:
    file = tmp_path / "peer.toml"
    file.write_text("port = -1")
    with pytest.raises(ConfigError, match=r"peer\.toml: port = -1; allowed is a whole number"):
        load_peer_config({}, environment={}, file=file)
    with pytest.raises(ConfigError, match=r"none\.toml: No such file"):
        load_peer_config({}, environment={}, file=tmp_path / "none.toml")


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        ("127.0.0.1", True),
        ("127.9.9.9:80", True),
        ("localhost:80", True),
        ("::1", True),
        ("[::1]:80", True),
        ("/ip4/127.0.0.1/tcp/1/p2p/Qm", True),
        ("0.0.0.0", False),
        ("::", False),
        ("192.0.2.1:80", False),
        ("[2001:db8::1]:80", False),
        ("example.org", False),
        ("/ip4/192.0.2.1/tcp/1", False),
        ("/dns/example.org/tcp/1", False),
    ],
)
def test_only_loopback_counts_as_staying_on_this_machine(address: str, expected: bool) -> None:
    assert is_loopback(address) is expected
