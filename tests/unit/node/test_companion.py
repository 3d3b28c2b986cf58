"""What a learner that can be reached asks for is its standby's, and the standby is started as a person would."""

from __future__ import annotations

from pathlib import Path

import pytest

from geo_diloco.config import PeerConfig, load_peer_config, peer_config_from
from geo_diloco.manifest import RunId
from geo_diloco.node.companion import LEARNERS_ALONE, RATES, learners_own, standbys_own
from geo_diloco.runtime.invite import Invite

MADDR = "/ip4/192.0.2.1/tcp/31330/p2p/QmS3GLgjqzHA3WXTxwQTnLF5fxx5DzAMPu7rK1vLfH7Kuo"
INVITE = Invite(run=RunId("1" * 40), bootstraps=(MADDR,), token="", name="run")
CONFIG = peer_config_from(
    {
        "announce": "learner.example:31340",
        "host": "0.0.0.0",
        "port": 31340,
        "bootstraps": (MADDR,),
        "contacts": ("192.0.2.7:31340",),
        "device": "cpu",
        "save_every_s": 3.0,
        "pace_ms": 30,
        "keep_contributions": True,
        "elector": False,
        "data_dir": Path("texts"),
    }
)


def standbys(config: PeerConfig) -> PeerConfig:
    """What the standby's process makes of its environment."""
    return load_peer_config({}, environment=standbys_own(config))


def test_the_standby_gets_what_was_said_about_being_reached_and_nothing_about_training() -> None:
    got = standbys(CONFIG)
    assert (got.announce, got.host, got.port, got.bootstraps) == ("learner.example:31340", "0.0.0.0", 31340, (MADDR,))
    assert (got.keep_contributions, got.elector, got.data_dir, got.threads) == (True, False, Path("texts"), 1)
    assert not {"device", "save_every_s", "pace_ms", "run_dir"} & got.model_fields_set


def test_what_was_not_said_is_left_to_the_standby() -> None:
    assert standbys(peer_config_from({"announce": "learner.example"})).model_fields_set == {"announce", "threads"}


@pytest.mark.parametrize("name", sorted(set(PeerConfig.model_fields) - LEARNERS_ALONE))
def test_every_setting_that_is_not_about_training_gets_there(name: str) -> None:
    said = {
        "announce": "learner.example:31340",
        "host": "0.0.0.0",
        "port": 1,
        "dht_host": "0.0.0.0",
        "dht_port": 2,
        "bootstraps": (MADDR,),
        "contacts": ("192.0.2.7:31340",),
        "data_dir": Path("texts"),
        "elector": False,
        "keep_contributions": True,
        "max_up": "10mbit",
        "max_down": "1.2MB/s",
        "quota": "50GB/day",
        "mirror": False,
        "congestion": "cubic",
        "log_level": "debug",
    }
    config = peer_config_from({name: said[name]})
    wanted = getattr(config, name)
    assert getattr(standbys(config), name) == (wanted // 2 if name in RATES else wanted)


def test_a_limit_on_the_line_is_one_for_learner_and_standby_together() -> None:
    config = peer_config_from(
        {"announce": "learner.example", "max_up": "10mbit", "max_down": "64kbit", "mirror": False}
    )
    one, other = learners_own(config), standbys(config)
    assert one.max_up + other.max_up == config.max_up == 1_250_000
    assert (one.max_down, other.max_down) == (8_000, 8_000), "no less than anybody may set"
    assert not other.mirror, "whose owner wants no mirror has none"


def test_the_learner_dials_out_only_and_leaves_the_vote_to_the_standby() -> None:
    own = learners_own(CONFIG)
    assert (own.announce, own.host, own.dht_host, own.elector) == ("", "127.0.0.1", "127.0.0.1", False)
    assert (own.device, own.save_every_s, own.pace_ms) == ("cpu", 3.0, 30)
    assert (own.data_dir, own.bootstraps) == (Path("texts"), (MADDR,))
    assert own.contacts == CONFIG.contacts
