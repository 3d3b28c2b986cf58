"""What the averaging race makes of both sides' notes, written here; and what it asks for before it begins."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from geo_diloco.cli.demo_files import toml_from_manifest
from geo_diloco.config.manifests import load_manifest
from tests.support import averaging_race
from tests.support.race_figures import Hand, Merge, Turn, Usage, ratio_of, row_of, sweeps_of, within
from tests.support.race_ours import Ours, plan_for

USAGE = Usage(
    seconds=10.0,
    bytes_out=(30_000_000, 10_000_000),
    bytes_in=(10_000_000, 40_000_000),
    bytes_per_s=(5_000_000, 20_000_000),
    cpu_s=8.0,
    wires_cpu_s=2.0,
    wires_late_s=0.05,
    machine_share=0.6,
)
OURS = Ours(
    name="ours",
    codec="int4",
    syncer="shared",
    peers=4,
    parameters=10_000_000,
    bytes_per_s=6_250_000,
    round_trip_s=0.08,
    fragments=8,
    congestion="bbr",
    room=1.5,
    sweeps=4,
)


def merge(fragment: int, version: int, *peers: str) -> Merge:
    return Merge(fragment=fragment, version=version, fresh=frozenset(f"{peer}{fragment}{version}" for peer in peers))


def hand(peer: str, times: dict[tuple[int, int], tuple[int, int]]) -> Hand:
    """`times`: (sampled, adopted) by (fragment, version)."""
    return Hand(
        sampled_ms={f"{peer}{fragment}{version}": begin for (fragment, version), (begin, _) in times.items()},
        adopted_ms={key: end for key, (_, end) in times.items()},
    )


def test_a_sweep_lasts_from_the_first_sample_to_the_last_adoption() -> None:
    ann = hand("a", {(0, 1): (100, 900), (1, 1): (400, 1_300)})
    ben = hand("b", {(0, 1): (150, 1_000), (1, 1): (450, 1_200)})
    (sweep,) = sweeps_of([merge(0, 1, "a", "b"), merge(1, 1, "a", "b")], [ann, ben], num_fragments=2)
    assert (sweep.began_ms, sweep.ended_ms, sweep.took_s) == (100, 1_300, 1.2)
    assert sweep.fragment_s == 0.9, "each from its own first sample on"


def test_a_sweep_that_somebody_was_not_in_is_none() -> None:
    times = {(fragment, version): (version * 1_000, version * 1_000 + 500) for fragment in (0, 1) for version in (1, 2)}
    hands = [hand("a", times), hand("b", times)]
    whole = [merge(fragment, version, "a", "b") for fragment in (0, 1) for version in (1, 2)]
    assert [each.version for each in sweeps_of(whole, hands, num_fragments=2)] == [1, 2]
    without_ben = [*whole[:-1], merge(1, 2, "a")]
    assert [each.version for each in sweeps_of(without_ben, hands, num_fragments=2)] == [1]
    not_adopted = [hands[0], replace(hands[1], adopted_ms={(0, 1): 1_500, (1, 1): 1_500, (0, 2): 2_500})]
    assert [each.version for each in sweeps_of(whole, not_adopted, num_fragments=2)] == [1]
    assert [each.version for each in sweeps_of(whole[:3], hands, num_fragments=2)] == [1], (
        "of one fragment it is missing"
    )
    assert sweeps_of(whole, [], num_fragments=2) == []


def test_only_sweeps_that_lie_within_count() -> None:
    times = {(0, version): (version * 1_000, version * 1_000 + 500) for version in (1, 2, 3)}
    sweeps = sweeps_of([merge(0, version, "a") for version in (1, 2, 3)], [hand("a", times)], num_fragments=1)
    assert [each.version for each in within(sweeps, 1_001, 3_500)] == [2, 3]
    assert [each.version for each in within(sweeps, 1_000, 3_499)] == [1, 2]


def test_a_row_is_of_one_round_whatever_was_watched() -> None:
    one = Turn(side="x", seconds=(3.0, 5.0), usage=USAGE, rounds=2.5, formed_s=(0.5,))
    other = Turn(side="x", seconds=(4.0,), usage=replace(USAGE, wires_late_s=0.2), rounds=1.5, formed_s=(0.7,))
    row = row_of([one, other])
    assert (row["rounds"], row["seconds_median"], row["seconds_min"], row["seconds_max"]) == (3, 4.0, 3.0, 5.0)
    assert row["seconds_all"] == [3.0, 5.0, 4.0]
    assert row["mb_busiest_link"] == 20.0, "80 MB in four rounds, by the fuller direction of the busiest host"
    assert row["link_alone_s"] == 3.0, "12 s in four rounds, by the link that has most to do for its rate"
    assert row["cpu_s"] == 4.0 and row["wires_cpu_s"] == 1.0
    assert row["wires_late_ms_max"] == 200.0
    assert row["formed_s_median"] == pytest.approx(0.6)


def test_a_side_without_a_whole_round_has_a_row_and_no_ratio() -> None:
    row = row_of([Turn(side="x", seconds=(), usage=USAGE, rounds=0.5)])
    assert row["rounds"] == 0 and row["seconds_median"] == 0.0
    assert averaging_race.ratios_of([row, row | {"side": "theirs-16", "rounds": 1}]) == {}


def test_the_ratio_is_of_medians_ours_to_theirs() -> None:
    rows = [
        {"side": "int4-own", "seconds_median": 3.0, "rounds": 2},
        {"side": "theirs-16", "seconds_median": 9.0, "rounds": 2},
    ]
    assert ratio_of(rows, "int4-own", "theirs-16") == pytest.approx(1 / 3)
    assert averaging_race.ratios_of(rows) == {"int4-own/theirs-16": pytest.approx(1 / 3)}


def test_an_interval_leaves_the_busiest_link_room() -> None:
    assert OURS.sweep_s == pytest.approx(3 * 10e6 * 0.47 / 6.25e6), "the learner beside the syncer needs no link"
    assert replace(OURS, syncer="own").sweep_s == pytest.approx(OURS.sweep_s * 4 / 3)
    assert replace(OURS, syncer="wide").sweep_s == pytest.approx(OURS.sweep_s / 3), "a learner's own is the busiest"
    assert OURS.interval_steps % OURS.fragments == 0
    assert 1.5 * OURS.sweep_s <= OURS.interval_steps * 0.03 < 1.5 * OURS.sweep_s + 8 * 0.03


@pytest.mark.parametrize(("codec", "block"), [("int4", 64), ("int8", 256), ("bf16", 64)])
def test_our_run_merges_all_peers_and_uses_one_codec_both_ways(tmp_path: Path, codec: str, block: int) -> None:
    manifest = plan_for(replace(OURS, codec=codec)).run
    (tmp_path / "run.toml").write_text(toml_from_manifest(manifest), encoding="utf-8")
    read = load_manifest(tmp_path / "run.toml")
    assert read.sync.quorum == 4 and read.sync.num_fragments == 8
    for leg in (read.codec_up, read.codec_down):
        assert (leg.name, leg.block) == (codec, block)


def test_where_there_are_no_namespaces_it_says_what_it_needs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(averaging_race, "why_no_namespaces", lambda: "network namespaces need root")
    assert averaging_race.main([]) == 2
    said = capsys.readouterr()
    assert said.err == "the averaging race can't be run here: network namespaces need root\n" and not said.out


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--rate", "quick"], "--rate"),
        (["--rtt", "80"], "--rtt"),
        (["--parameters", "10X"], "--parameters"),
        (["--fragments", "7"], "--fragments 7"),
        (["--fragments", "0"], "--fragments 0"),
        (["--congestion", "cubic"], "--congestion cubic"),
        (["--peers", "1"], "--peers 1"),
        (["--turns", "0"], "--turns 0"),
        (["--rounds", "0"], "--rounds 0"),
        (["--room", "nan"], "--room nan"),
        (["--part-kb", "0"], "--part-kb 0"),
    ],
)
def test_what_makes_no_race_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: list[str], named: str
) -> None:
    monkeypatch.setattr(averaging_race, "why_no_namespaces", lambda: "")
    monkeypatch.setattr(averaging_race, "congestion_granted", lambda asked: "bbr")
    monkeypatch.setattr(averaging_race, "measure_race", lambda race, folder: pytest.fail("it began"))
    assert averaging_race.main(arguments) == 1
    said = capsys.readouterr()
    assert named in said.err and said.err.count("\n") == 1
