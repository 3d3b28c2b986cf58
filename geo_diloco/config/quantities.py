"""Rates and amounts as people write them: `10mbit`, `1.2MB/s`, `50GB/day`."""

from __future__ import annotations

import re

_RATE = re.compile(r"\s*(\d{1,12}(?:\.\d{1,6})?)\s*([kKmMgG]?)([bB]it(?:/s)?|bps|B/s)\s*")
_AMOUNT = re.compile(r"\s*(\d{1,12}(?:\.\d{1,6})?)\s*([kKmMgGtT]?)B\s*/\s*day\s*")
_FACTORS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
RATE_MIN = 8_000
"""Bytes per second. Below that a transfer's streams could hardly be told from ones that stand still."""
RATE_FORM = "a rate of at least 64kbit, such as 10mbit or 1.2MB/s, or none"
AMOUNT_FORM = "an amount a day, such as 50GB/day, or none"


def bytes_per_s(text: str) -> int:
    """Of `10mbit`, `10mbit/s`, `10Mbps` (bits) or `1.2MB/s` (bytes); k, M and G are powers of 1000. `Mb/s` could be
    either and is refused. 0 for the empty text. Raises ValueError."""
    if not text.strip():
        return 0
    match = _RATE.fullmatch(text)
    if match is None:
        raise ValueError(f"{text[:40]!r} is not {RATE_FORM}")
    rate = int(float(match[1]) * _FACTORS[match[2].lower()] / (1 if match[3] == "B/s" else 8))
    if rate < RATE_MIN:
        raise ValueError(f"{text[:40]!r} is too slow to take part with: {RATE_FORM} is wanted")
    return rate


def bytes_per_day(text: str) -> int:
    """Of `50GB/day`; 0 for the empty text. Raises ValueError."""
    if not text.strip():
        return 0
    match = _AMOUNT.fullmatch(text)
    amount = 0 if match is None else int(float(match[1]) * _FACTORS[match[2].lower()])
    if amount == 0:
        raise ValueError(f"{text[:40]!r} is not {AMOUNT_FORM}")
    return amount
