"""What each command hands to the node, and what it prints; the node itself is a fake here."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import sys
import time
import types
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from geo_diloco.cli import app as cli
from geo_diloco.cli import options
from geo_diloco.config import PeerConfig, load_manifest
from geo_diloco.errors import ConfigError, InviteError, RefusedError, RemoteProtocolError, TapeError, UserError
from geo_diloco.manifest import RunId
from geo_diloco.runtime.invite import Invite
from geo_diloco.tape import ReplayResult

RUN = RunId("0f" * 20)
LOCAL = Invite(run=RUN, bootstraps=("/ip4/127.0.0.1/tcp/1/p2p/Qm1",))
CONTACT = "127.0.0.1:7700"
REMOTE = Invite(run=RUN, bootstraps=("/ip4/192.0.2.1/tcp/1/p2p/Qm1",))
STATUS: dict[str, Any] = {
    "run": RUN,
    "name": "a\x1b[31mrun",
    "peer": "ab" * 32,
    "role": "syncer",
    "term": 1,
    "seq": 7,
    "finished": False,
    "heldout": [[1, 5.6, 0.0], [7, 2.1, 30.0]],
    "tokens_total": 1000,
    "commits": 5,
    "progress": 0.25,
    "rules": {"quorum": {"value": 2, "amended_at": 41}, "eta": {"value": 0.7, "amended_at": None}},
    "learners": [
        {
            "peer": "cd" * 32,
            "host": "box",
            "connected": False,
            "step": 24,
            "tokens": 3072,
            "tokens_per_s": 900.4,
            "loss": None,
            "step_time_ms": 1.0,
            "doing": "training",
        }
    ],
    "rounds": [
        {
            "round": 3,
            "fragment": 2,
            "version": 1,
            "participants": 3,
            "live": 4,
            "quorum_wait_ms": 12,
            "grace_ms": 8,
            "reason": "all expected delivered",
        }
    ],
    "waiting": [{"fragment": 1, "reason": "quorum: 0 of 1"}],
    "bytes_in": 10,
    "bytes_out": 20,
    "bytes_per_param_up": 0.4,
    "bytes_per_param_down": 0.5,
    "uptime_s": 31.0,
}


@dataclass(frozen=True)
class FounderInfo:
    """As the node's, as far as it is printed."""

    run: str = RUN
    peer: str = "ab" * 32
    invite: str = "gd1-invite"
    http: str = "127.0.0.1:31340"
    run_dir: Path = Path("somewhere")
    served_by: str | None = "ab" * 32
    served_at: str = ""
    finished: str | None = None


@dataclass
class FakeNode:
    """Stands in for `geo_diloco.node`: records what it was asked for."""

    calls: list[tuple[Any, ...]] = field(default_factory=list)
    exit_status: int = 0
    more_status: dict[str, Any] = field(default_factory=dict)
    replayed: ReplayResult = field(default_factory=ReplayResult)

    info: FounderInfo = FounderInfo()

    def run_founder(self, source: Path, config: PeerConfig, *, on_ready: Any) -> int:
        self.calls.append(("founder", source, config))
        on_ready(self.info)
        return self.exit_status

    def run_standby(self, invite: Invite, config: PeerConfig) -> int:
        self.calls.append(("standby", invite, config))
        return 0

    def hand_over(self, run_dir: Path, *, to: str) -> str:
        self.calls.append(("hand over", run_dir, to))
        return "handed over"

    def amend(self, run: str, settings: list[str], *, key: Any, contacts: Any, wait: bool) -> dict[str, Any]:
        self.calls.append(("amend", run, settings, key, *contacts, wait))
        rules = {"quorum": {"value": 2, "amended_at": 41}, "grace": {"value": False, "amended_at": 41}}
        rules |= {"eta": {"value": 0.7, "amended_at": None}, "minutes": {"value": 90.0, "amended_at": 7}}
        return {"number": 3, "given": ["quorum"], "rules": rules if wait else None, "warnings": ["few learners"]}

    def reform(self, run: str, electors: list[str], *, confirm: Any, **more: Any) -> str:
        self.calls.append(("reform", run, electors, more))
        return "reformed" if more["dry_run"] or confirm("what is intended") else "nothing is reformed"

    def run_follower(self, invite: Invite, config: PeerConfig) -> int:
        self.calls.append(("follower", invite, config))
        return self.exit_status

    def fetch_status(self, invite: Invite, contacts: Sequence[str]) -> dict[str, Any]:
        self.calls.append(("status", invite, *contacts))
        return STATUS | self.more_status

    def folder_status(self, root: Path, contacts: Sequence[str]) -> dict[str, Any]:
        self.calls.append(("folder status", root, *contacts))
        return STATUS | self.more_status

    def export(self, run_dir: Path, to: Path) -> Path:
        self.calls.append(("export", run_dir, to))
        return to

    def replay(self, tape: Path) -> ReplayResult:
        self.calls.append(("replay", tape))
        return self.replayed

    @contextlib.contextmanager
    def join(self, invite: Invite, config: PeerConfig) -> Iterator[str]:
        self.calls.append(("learner", invite, config))
        yield "a peer"


@pytest.fixture
def node(monkeypatch: pytest.MonkeyPatch) -> FakeNode:
    fake = FakeNode()
    module = types.ModuleType("geo_diloco.node")
    loop = types.ModuleType("geo_diloco.training.loop")
    for name in (
        "run_founder",
        "run_follower",
        "run_standby",
        "hand_over",
        "amend",
        "reform",
        "fetch_status",
        "folder_status",
        "join",
        "export",
        "replay",
    ):
        setattr(module, name, getattr(fake, name))
    loop.train = lambda peer: fake.calls.append(("train", peer))  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "geo_diloco.node", module)
    monkeypatch.setitem(sys.modules, "geo_diloco.training.loop", loop)
    return fake


def run(*arguments: str) -> Any:
    return CliRunner().invoke(cli.app, list(arguments), catch_exceptions=False)


# ---- init --------------------------------------------------------------------------------------------------------


def test_init_writes_a_manifest_that_can_be_started(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    result = run("init", str(path))
    assert result.exit_code == 0
    assert f"geo-diloco start {path}" in result.output
    assert load_manifest(path).sync.num_fragments == 4


def test_init_replaces_a_file_only_when_forced(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text("mine")
    with pytest.raises(ConfigError, match="is there already; choose another name, or replace it with --force"):
        run("init", str(path))
    assert path.read_text() == "mine"
    run("init", str(path), "--force")
    assert path.read_text() != "mine"


def test_init_into_a_folder_that_is_not_there_says_so(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file or directory; choose a file that you can write"):
        run("init", str(tmp_path / "none" / "run.toml"))


def test_init_names_a_file_where_a_folder_was_given(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"is a folder; name a file in it, such as .*run\.toml"):
        run("init", str(tmp_path), "--force")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ConfigError, match="pipe: is no plain file, and is not replaced"):
        run("init", str(tmp_path / "pipe"), "--force")


# ---- start -------------------------------------------------------------------------------------------------------


def test_start_hands_the_settings_on_and_prints_how_to_join_and_resume(node: FakeNode, tmp_path: Path) -> None:
    maddr = "/ip4/127.0.0.1/tcp/1/p2p/QmYyQSo1c1Ym7orWxLYvCrM2EmxFTANf8wXmmE7DWjhx5N"
    result = run("start", "run.toml", "--port", "0", "--run-dir", str(tmp_path), "--bootstrap", maddr)
    assert result.exit_code == 0
    (kind, source, config) = node.calls[0]
    assert (kind, source) == ("founder", Path("run.toml"))
    assert config == PeerConfig(port=0, run_dir=tmp_path, bootstraps=(maddr,))
    assert "geo-diloco join gd1-invite" in result.stdout
    assert "add --contact 127.0.0.1:31340" in result.stdout
    assert "geo-diloco start somewhere" in result.stdout


def test_start_as_json_prints_one_object_on_one_line(node: FakeNode) -> None:
    result = run("start", "run.toml", "--json")
    assert json.loads(result.stdout) == {
        "run": RUN,
        "peer": "ab" * 32,
        "invite": "gd1-invite",
        "http": "127.0.0.1:31340",
        "run_dir": "somewhere",
        "served_by": "ab" * 32,
        "served_at": "",
        "finished": None,
    }
    assert result.stdout.count("\n") == 1


def test_the_nodes_exit_status_is_the_commands(node: FakeNode) -> None:
    node.exit_status = 3
    assert run("start", "run.toml").exit_code == 3
    assert run("join", LOCAL.to_string(), "--no-train").exit_code == 3


def test_who_can_join_is_told_as_it_is(node: FakeNode) -> None:
    assert "join from this machine (it listens on loopback only; for others: --host" in run("start", "run.toml").stdout
    node.info = FounderInfo(http="192.0.2.1:31340")
    assert "join from any machine that reaches this one" in run("start", "run.toml").stdout


def test_who_takes_a_run_up_again_reads_who_serves_it_or_that_it_is_over(node: FakeNode) -> None:
    assert f"run {RUN} is open; its files are in somewhere" in run("start", "run").stdout
    node.info = FounderInfo(served_by="cd" * 32, served_at="192.0.2.1:5")
    goes_on = f"run {RUN} goes on: cdcdcdcd serves it at 192.0.2.1:5, and this peer is a standby; its files are in"
    assert goes_on in run("start", "run").stdout
    node.info = FounderInfo(served_by=None)
    assert f"run {RUN} is taken up again, and nobody serves it yet" in run("start", "run").stdout
    node.info = FounderInfo(finished="3 minutes are over", run_dir=Path("a b"))
    over = run("start", "run").stdout
    assert f"run {RUN} is finished (3 minutes are over)" in over and "join" not in over
    assert "geo-diloco export 'a b' --to my-model" in over


def test_an_address_at_which_nobody_listens_is_warned_of(node: FakeNode) -> None:
    said = run("start", "run.toml", "--announce", "192.0.2.2").stderr
    assert "warning: --announce 192.0.2.2, but this process listens on 127.0.0.1 only" in said
    assert "listens on" not in run("start", "run.toml", "--announce", "192.0.2.2", "--host", "0.0.0.0").stderr


def test_off_loopback_start_warns_that_traffic_is_not_encrypted(node: FakeNode) -> None:
    result = run("start", "run.toml", "--host", "0.0.0.0", "--announce", "example.org")
    assert "warning: 0.0.0.0 is not loopback, and traffic is not yet encrypted" in result.stderr
    assert "warning" not in run("start", "run.toml").stderr


# ---- join --------------------------------------------------------------------------------------------------------


def test_join_needs_only_the_invite(node: FakeNode) -> None:
    assert run("join", LOCAL.to_string()).exit_code == 0
    assert node.calls == [("learner", LOCAL, PeerConfig()), ("train", "a peer")]


def test_contacts_are_given_by_hand_where_no_bootstrap_answers(node: FakeNode) -> None:
    run("join", LOCAL.to_string(), "--contact", CONTACT, "--contact", "[::1]:2")
    assert node.calls[0] == ("learner", LOCAL, PeerConfig(contacts=(CONTACT, "[::1]:2")))
    for wrong in ("127.0.0.1", "127.0.0.1:0", "http://127.0.0.1:1", "127.0.0.1:99999", "a b:1"):
        with pytest.raises(ConfigError, match=r"--contact = .*allowed is up to 16 of the form HOST:PORT of a peer"):
            run("join", LOCAL.to_string(), "--contact", wrong)


def test_join_without_training_follows(node: FakeNode) -> None:
    run("join", LOCAL.to_string(), "--no-train", "--no-elector")
    assert node.calls == [("follower", LOCAL, PeerConfig(elector=False))]


def test_join_without_training_under_an_address_stands_by(node: FakeNode) -> None:
    run("join", LOCAL.to_string(), "--no-train", "--announce", "127.0.0.1:5")
    assert node.calls == [("standby", LOCAL, PeerConfig(announce="127.0.0.1:5"))]


def test_amend_says_what_is_in_force_since_when(node: FakeNode) -> None:
    result = run("amend", "a-run", "--set", "quorum=2", "--set", "grace=off", "--key", "k.pem")
    assert node.calls == [("amend", "a-run", ["quorum=2", "grace=off"], Path("k.pem"), True)]
    assert result.stdout.splitlines() == [
        "amendment 3 is in force:",
        "quorum 2 (amended at seq 41)",
        "grace off (amended at seq 41)",
        "minutes 90 (amended at seq 7)",
    ]
    flags = ("--set", "quorum=2", "--no-wait", "--contact", CONTACT)
    result = run("amend", "a-run", *flags)
    assert "amendment 3 is being appended" in result.stdout and result.stderr == "warning: few learners\n"
    assert node.calls[-1] == ("amend", "a-run", ["quorum=2"], None, CONTACT, False)


def test_only_who_can_be_syncer_can_keep_contributions(node: FakeNode) -> None:
    with pytest.raises(ConfigError, match="give --announce"):
        run("join", LOCAL.to_string(), "--keep-contributions")
    run("join", LOCAL.to_string(), "--keep-contributions", "--announce", "127.0.0.1")
    assert node.calls[0][2].keep_contributions


def test_reform_shows_what_it_would_do_and_asks(node: FakeNode) -> None:
    asked = CliRunner().invoke(
        cli.app, ["reform", "a-run", "--electors", "ab, cd"], input="n\n", catch_exceptions=False
    )
    plain = {"key": None, "contacts": (), "dry_run": False, "force": False}
    assert node.calls == [("reform", "a-run", ["ab", "cd"], plain)]
    assert "what is intended" in asked.stdout and asked.stdout.endswith("nothing is reformed\n")
    assert run("reform", "a-run", "--electors", "all-live", "--yes").stdout == "what is intended\nreformed\n"
    flags = ("--dry-run", "--force", "--key", "k.pem", "--contact", CONTACT)
    run("reform", "a-run", "--electors", "all-live", *flags)
    given = {"key": Path("k.pem"), "contacts": [CONTACT], "dry_run": True, "force": True}
    assert node.calls[-1] == ("reform", "a-run", ["all-live"], given)


def test_handover_names_the_folder_and_whom(node: FakeNode) -> None:
    assert run("handover", "a-run", "--to", "ab").stdout == "handed over\n"
    assert node.calls == [("hand over", Path("a-run"), "ab")]


def test_join_takes_flags_over_the_environment(node: FakeNode, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("GEO_DILOCO_DEVICE", "cuda:1")
    monkeypatch.setenv("GEO_DILOCO_DTYPE", "bfloat16")
    flags = ("--device", "cpu", "--threads", "1", "--data-dir", str(tmp_path), "--save-every-s", "5", "--pace", "30")
    run("join", LOCAL.to_string(), *flags)
    expected = PeerConfig(device="cpu", dtype="bfloat16", threads=1, data_dir=tmp_path, save_every_s=5.0, pace_ms=30)
    assert node.calls[0][2] == expected


def test_a_pace_without_inner_steps_is_refused(node: FakeNode) -> None:
    with pytest.raises(ConfigError, match=r"--pace 30: only a peer that trains has inner steps; leave out --no-train"):
        run("join", LOCAL.to_string(), "--pace", "30", "--no-train")
    assert node.calls == []


def test_joining_a_run_elsewhere_warns_that_traffic_is_not_encrypted(node: FakeNode) -> None:
    assert "traffic is not yet encrypted" in run("join", REMOTE.to_string()).stderr
    assert "warning" not in run("join", LOCAL.to_string()).stderr


def test_a_bad_invite_is_named_before_anything_starts(node: FakeNode) -> None:
    with pytest.raises(InviteError):
        run("join", "gd1-nonsense")
    assert node.calls == []


# ---- status ------------------------------------------------------------------------------------------------------


def test_status_as_json_is_what_the_syncer_said(node: FakeNode) -> None:
    assert json.loads(run("status", LOCAL.to_string(), "--json").stdout) == STATUS


def test_status_asks_contacts_and_says_if_new_peers_need_one(node: FakeNode) -> None:
    assert "bootstrap" not in run("status", LOCAL.to_string(), "--contact", CONTACT).stdout
    assert node.calls == [("status", LOCAL, CONTACT)]
    at = time.mktime((2026, 11, 30, 14, 2, 0, 0, 0, -1))
    node.more_status = {"bootstraps": {"count": 1, "silent_since": at}}
    said = "no bootstrap answers since 14:02; the run goes on, new peers need a contact (--contact HOST:PORT)"
    assert said in run("status", LOCAL.to_string()).stdout.splitlines()
    node.more_status = {"bootstraps": {"count": 1, "silent_since": 1e300}}
    assert "bootstrap" not in run("status", LOCAL.to_string()).stdout


def test_a_folder_of_the_run_will_do_for_status(node: FakeNode, tmp_path: Path) -> None:
    assert "25% done" in run("status", str(tmp_path), "--contact", CONTACT).stdout
    assert node.calls == [("folder status", tmp_path, CONTACT)]


def test_an_answer_that_is_no_status_is_one_line(node: FakeNode) -> None:
    node.more_status = {"progress": "much"}
    with pytest.raises(RemoteProtocolError, match="what was answered is not a run's status: ValueError"):
        run("status", LOCAL.to_string())


# ---- export and replay -------------------------------------------------------------------------------------------


def test_export_says_where_the_model_is(node: FakeNode, tmp_path: Path) -> None:
    assert run("export", "run-dir", "--to", str(tmp_path)).stdout == f"wrote {tmp_path}\n"
    assert node.calls == [("export", Path("run-dir"), tmp_path)]


def test_a_folder_is_replayed_by_the_tape_in_it(node: FakeNode, tmp_path: Path) -> None:
    run("replay", str(tmp_path))
    assert node.calls == [("replay", tmp_path / "tape.jsonl")]


def test_a_replay_without_divergence_says_what_was_checked(node: FakeNode) -> None:
    node.replayed = ReplayResult(num_boots=2, num_events=10, num_effects=7, updates_checked=3)
    text = run("replay", "tape.jsonl").stdout
    assert "10 events of 2 starts gave the same 7 effects; 3 updates redone" in text
    assert json.loads(run("replay", "tape.jsonl", "--json").stdout)["updates_checked"] == 3
    assert "merges" not in text, "a peer that never was syncer has none"


def test_a_replay_says_how_many_merges_were_redone_and_how_many_could_not_be(node: FakeNode) -> None:
    node.replayed = ReplayResult(num_boots=1, merges_redone=5)
    text = run("replay", "tape.jsonl").stdout
    assert "5 merges redone" in text and "could not" not in text
    node.replayed = ReplayResult(num_boots=1, merges_redone=5, merges_missing=2)
    assert "2 could not be redone" in run("replay", "tape.jsonl").stdout
    assert json.loads(run("replay", "tape.jsonl", "--json").stdout)["merges_missing"] == 2


def test_a_divergence_is_an_error_that_names_the_record(node: FakeNode) -> None:
    node.replayed = ReplayResult(divergence="tape.jsonl:7: Tick: asked for Send")
    with pytest.raises(TapeError, match=r"diverges at tape\.jsonl:7: Tick"):
        run("replay", "tape.jsonl")


# ---- bootstrap ---------------------------------------------------------------------------------------------------


def test_a_bootstrap_cannot_announce_a_port_that_it_does_not_know() -> None:
    with pytest.raises(ConfigError, match="--port = 0; allowed with --announce is a fixed port"):
        run("bootstrap", "--port", "0", "--announce", "example.org")


@pytest.mark.parametrize("host", ["", "a b"])
def test_a_bootstrap_listens_on_an_address_and_not_on_a_slip_of_the_pen(host: str) -> None:
    with pytest.raises(ConfigError, match=r"--host = .*an address of this machine to listen on"):
        run("bootstrap", "--host", host, "--port", "0")


# ---- who reads along ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [errno.EPIPE, errno.ENOSPC])
def test_what_goes_on_goes_on_when_nobody_reads_along(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(options, "_hush", lambda stream: None)
    monkeypatch.setattr(typer, "echo", failing_echo(number))
    options.say("the run is open")


def test_an_answer_that_can_not_be_written_is_an_error_unless_the_reader_has_seen_enough(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(options, "_hush", lambda stream: None)
    monkeypatch.setattr(typer, "echo", failing_echo(errno.EPIPE))
    options.answer("a long one")
    monkeypatch.setattr(typer, "echo", failing_echo(errno.ENOSPC))
    with pytest.raises(ConfigError, match="standard output: No space left on device"):
        options.answer("a long one")


def failing_echo(number: int) -> Any:
    def echo(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number))

    return echo


# ---- the border --------------------------------------------------------------------------------------------------


def test_an_error_becomes_one_line_with_its_code_and_exit_status(
    node: FakeNode, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(invite: Invite, config: PeerConfig) -> int:
        raise RefusedError("layout differs:\nfirst at lm_head")

    monkeypatch.setattr(sys.modules["geo_diloco.node"], "run_follower", refuse)
    monkeypatch.setattr(sys, "argv", ["geo-diloco", "join", LOCAL.to_string(), "--no-train"])
    with pytest.raises(SystemExit) as left:
        cli.main()
    assert left.value.code == RefusedError.exit_status
    assert capsys.readouterr().err == "error GD-202: layout differs: first at lm_head\n"


@pytest.mark.parametrize(
    ("number", "path", "said"),
    [
        (errno.ENAMETOOLONG, LOCAL.to_string() * 3, f"{LOCAL.to_string()[:60]}...: file name too long"),
        (errno.EACCES, "runs/ada", "runs/ada: permission denied"),
    ],
)
def test_a_path_that_can_not_even_be_looked_at_is_one_line(
    node: FakeNode,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    number: int,
    path: str,
    said: str,
) -> None:
    def look(source: Path, config: PeerConfig, **_: object) -> int:
        raise OSError(number, os.strerror(number), path)

    monkeypatch.setattr(sys.modules["geo_diloco.node"], "run_founder", look)
    monkeypatch.setattr(sys, "argv", ["geo-diloco", "start", path])
    with pytest.raises(SystemExit) as left:
        cli.main()
    assert left.value.code == UserError.exit_status
    assert capsys.readouterr().err == f"error GD-100: {said}; give a path that you can use\n"


def test_a_bug_keeps_its_traceback(node: FakeNode, monkeypatch: pytest.MonkeyPatch) -> None:
    def break_down(invite: Invite, contacts: Sequence[str]) -> dict[str, Any]:
        raise ZeroDivisionError

    monkeypatch.setattr(sys.modules["geo_diloco.node"], "fetch_status", break_down)
    monkeypatch.setattr(sys, "argv", ["geo-diloco", "status", LOCAL.to_string()])
    with pytest.raises(ZeroDivisionError):
        cli.main()


@pytest.mark.parametrize(
    "arguments", [["unknown"], ["join"], ["start", "run.toml", "--port", "x"], ["join", "--nope", "x"]]
)
def test_wrong_usage_exits_with_2(arguments: list[str]) -> None:
    assert CliRunner().invoke(cli.app, arguments).exit_code == 2


# ---- command lines that are none ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        (["strat"], "No such command 'strat'. Did you mean 'start' or 'status'? see `geo-diloco --help`"),
        (["zzz"], "No such command 'zzz'; see `geo-diloco --help`"),
        (["start"], "Missing argument 'source'; see `geo-diloco start --help`"),
        (["join", "gd1-x", "--port", "abc"], "Invalid value for '--port'"),
        (["status", "--prot"], "No such option: --prot"),
    ],
)
def test_a_mistyped_command_is_one_line_with_a_code_and_where_to_look(
    arguments: list[str], what: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["geo-diloco", *arguments])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    said = capsys.readouterr().err
    assert ended.value.code == 2
    assert said.startswith(f"error GD-100: {what}") and said.count("\n") == 1


def test_without_a_command_the_help_is_shown(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["geo-diloco"])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 2 and "demo" in "".join(capsys.readouterr())
