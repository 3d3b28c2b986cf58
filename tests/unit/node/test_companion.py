"""What a learner that can be reached asks for is its standby's, and the standby is started as a person would."""

from __future__ import annotations

import sys
from pathlib import Path

from geo_diloco.config import peer_config_from
from geo_diloco.manifest import RunId
from geo_diloco.node.companion import learners_own, standby_command
from geo_diloco.runtime.invite import Invite

MADDR = "/ip4/192.0.2.1/tcp/31330/p2p/QmS3GLgjqzHA3WXTxwQTnLF5fxx5DzAMPu7rK1vLfH7Kuo"
INVITE = Invite(run=RunId("1" * 40), bootstraps=(MADDR,), token="", name="run")
CONFIG = peer_config_from(
    {
        "announce": "learner.example:31340",
        "host": "0.0.0.0",
        "port": 31340,
        "bootstraps": (MADDR,),
        "device": "cpu",
        "save_every_s": 3.0,
        "keep_contributions": True,
        "elector": False,
        "data_dir": Path("texts"),
    }
)


def test_the_standby_gets_what_was_said_about_being_reached_and_nothing_about_training() -> None:
    command = standby_command(INVITE, Path("below"), CONFIG)
    assert command[:4] == [sys.executable, "-m", "geo_diloco", "join"] and command[4] == INVITE.to_string()
    said = " ".join(command[5:])
    for part in (
        "--no-train",
        "--run-dir below",
        "--announce learner.example:31340",
        "--host 0.0.0.0",
        "--port 31340",
        f"--bootstrap {MADDR}",
        "--keep-contributions",
        "--no-elector",
        "--data-dir texts",
    ):
        assert part in said
    assert "--device" not in said and "--save-every-s" not in said


def test_what_was_not_said_is_left_to_the_standby() -> None:
    said = standby_command(INVITE, Path("below"), peer_config_from({"announce": "learner.example"}))
    assert not {"--host", "--port", "--keep-contributions", "--elector", "--no-elector"} & set(said)


def test_the_learner_dials_out_only_and_leaves_the_vote_to_the_standby() -> None:
    own = learners_own(CONFIG)
    assert (own.announce, own.host, own.dht_host, own.elector) == ("", "127.0.0.1", "127.0.0.1", False)
    assert (own.device, own.save_every_s, own.data_dir, own.bootstraps) == ("cpu", 3.0, Path("texts"), (MADDR,))
