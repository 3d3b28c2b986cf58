"""Sets of bytes as ranges: what of a blob is here, missing, or under way. Pure."""

from __future__ import annotations

from collections.abc import Iterable

Range = tuple[int, int]
"""From the first byte to behind the last one."""


def joined(ranges: Iterable[Range]) -> list[Range]:
    """In order, without empty ones, those that touch or overlap as one."""
    done: list[Range] = []
    for begin, end in sorted(each for each in ranges if each[0] < each[1]):
        if done and begin <= done[-1][1]:
            done[-1] = (done[-1][0], max(end, done[-1][1]))
        else:
            done.append((begin, end))
    return done


def without(ranges: Iterable[Range], others: Iterable[Range]) -> list[Range]:
    """What is in `ranges` and in none of the others."""
    left: list[Range] = []
    cuts = joined(others)
    at = 0
    for begin, end in joined(ranges):
        while at < len(cuts) and cuts[at][1] <= begin:
            at += 1
        for cut_begin, cut_end in cuts[at:]:
            if cut_begin >= end:
                break
            if begin < cut_begin:
                left.append((begin, cut_begin))
            begin = cut_end
        if begin < end:
            left.append((begin, end))
    return left


def num_bytes(ranges: Iterable[Range]) -> int:
    """Of ranges that do not overlap."""
    return sum(end - begin for begin, end in ranges)
