"""Rates and amounts as people write them."""

from __future__ import annotations

import pytest

from geo_diloco.config import peer_config_from
from geo_diloco.config.quantities import bytes_per_day, bytes_per_s
from geo_diloco.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("", 0),
        ("10mbit", 1_250_000),
        ("10 Mbit/s", 1_250_000),
        ("10Mbps", 1_250_000),
        ("1.2MB/s", 1_200_000),
        ("64kbit", 8_000),
        ("100000B/s", 100_000),
        ("2Gbit", 250_000_000),
    ],
)
def test_a_rate_is_read_in_bits_or_bytes(text: str, wanted: int) -> None:
    assert bytes_per_s(text) == wanted


@pytest.mark.parametrize(
    "text", ["10", "10Mb/s", "10mb", "fast", "-1mbit", "1e9bit", "63kbit", "0mbit", "10mbit/h", "1MB"]
)
def test_what_is_no_rate_or_could_be_two_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"10mbit or 1\.2MB/s"):
        bytes_per_s(text)


@pytest.mark.parametrize(("text", "wanted"), [("", 0), ("50GB/day", 50 * 10**9), ("1.5 TB / day", 15 * 10**11)])
def test_an_amount_a_day_is_read(text: str, wanted: int) -> None:
    assert bytes_per_day(text) == wanted


@pytest.mark.parametrize("text", ["50GB", "50Gbit/day", "50GB/month", "0GB/day", "much"])
def test_what_is_no_amount_a_day_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="50GB/day"):
        bytes_per_day(text)


def test_settings_take_them_as_written_and_say_what_was_wanted() -> None:
    config = peer_config_from({"max_up": "10mbit", "quota": "50GB/day", "congestion": "cubic"})
    assert (config.max_up, config.max_down, config.quota, config.mirror) == (1_250_000, 0, 50 * 10**9, True)
    with pytest.raises(ConfigError, match=r'max_down = "quick"; allowed is a rate of at least 64kbit'):
        peer_config_from({"max_down": "quick"})
    with pytest.raises(ConfigError, match="quota"):
        peer_config_from({"quota": "50GB"})
