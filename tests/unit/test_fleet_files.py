"""A fleet file as a person writes it, and what it is told when it is wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

from geo_diloco.config import load_fleet
from geo_diloco.errors import ConfigError

MODEL = "[model]\nparameters = 1e6\ntokens_per_step = 100\n"
MACHINE = '[[machine]]\nname = "desk"\nstep_s = 1.5\nup_mbit = 40\ndown_mbit = 200.0\n'


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "fleet.toml"
    path.write_text(text)
    return path


def test_keys_left_out_have_the_manifest_s_defaults(tmp_path: Path) -> None:
    file = load_fleet(written(tmp_path, MODEL + MACHINE + MACHINE.replace("machine", "volunteer") + "count = 3\n"))
    assert (file.sync.interval_steps, file.sync.fragments, file.sync.quorum, file.sync.codec) == (24, 24, 1, "int4")
    assert (len(file.machines), file.machines[0].on_from, file.volunteers[0].count) == (1, 0.0, 3)
    assert file.machines[0].rtt_ms == 40.0


def test_a_byte_order_mark_is_no_mistake(tmp_path: Path) -> None:
    path = tmp_path / "fleet.toml"
    path.write_bytes(b"\xef\xbb\xbf" + (MODEL + MACHINE).encode())
    assert load_fleet(path).machines[0].name == "desk"


def test_what_is_no_text_is_told(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="Is a directory"):
        load_fleet(tmp_path)
    (tmp_path / "fleet.toml").write_bytes(b"[model]\n\xff\xfe\x00")
    with pytest.raises(ConfigError, match=r"not UTF-8 text \(byte 8\)"):
        load_fleet(tmp_path / "fleet.toml")


def test_the_examples_can_be_read() -> None:
    examples = Path(__file__).parents[2] / "examples"
    file = load_fleet(examples / "fleet.toml")
    assert file.machines and file.volunteers
    fleets = [load_fleet(path) for path in sorted((examples / "fleets").glob("*.toml"))]
    assert [sum(each.count for each in file.machines) for file in fleets] == [4, 4, 4]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (MODEL, r"fleet.toml: no machines; write each as a \[\[machine\]\] table"),
        (MACHINE, "model has no parameters, tokens_per_step; write it"),
        (MODEL + MACHINE + "[[machines]]\n", r"machines is no known key; allowed are \[model\], \[sync\], \[\[machine"),
        (MODEL + MACHINE.replace("step_s", "steps_s"), "machine 1: steps_s = 1.5 is no known key; did you mean step_s"),
        (MODEL + MACHINE.replace("40", "-1"), "machine 1: up_mbit = -1; allowed is a number from 0.001"),
        (MODEL + MACHINE + "rtt_ms = -1\n", "machine 1: rtt_ms = -1; allowed is a number from 0"),
        (MODEL + '[sync]\ncodec = "int5"\n' + MACHINE, 'codec = "int5"; allowed is one of "none"'),
        (MODEL + "[sync]\nquorum = 2\n" + MACHINE, "quorum = 2: more than there are machines"),
        (MODEL + MACHINE + "count = 600\n" + MACHINE + "count = 600\n", "1200 machines; allowed are 1000"),
        (MODEL + MACHINE.replace("1.5", "0"), "machine 1: step_s = 0; allowed is a number from 0.001"),
        (MODEL + MACHINE.replace("1.5", "nan"), "machine 1: step_s = NaN; allowed is a number from 0.001"),
        (MODEL + MACHINE.replace("1.5", "1e400"), "machine 1: step_s = Infinity; allowed is a number from 0.001"),
        (MODEL + MACHINE.replace("1.5", "true"), "machine 1: step_s = true; allowed is a number from 0.001"),
        (MODEL + MACHINE.replace("1.5", '"2"'), 'machine 1: step_s = "2"; allowed is a number from 0.001'),
        (MODEL + MACHINE.replace("1.5", "1" * 5000), r"not TOML: Exceeds the limit \(4300 digits\)"),
        (MODEL + MACHINE.replace("desk", "\\u001b[31m"), "allowed is text of 1 to 60 characters, on one line"),
        (MODEL + MACHINE.replace("desk", "a\\nb"), "allowed is text of 1 to 60 characters, on one line"),
        (MODEL + MACHINE.replace("desk", "x" * 61), "allowed is text of 1 to 60 characters, on one line"),
        ("model = 3\n" + MACHINE, "model = 3; wanted is a table with parameters, tokens_per_step"),
        ("machine = [3]\n" + MODEL, "machine 1 = 3; wanted is a table with name, step_s, up_mbit"),
        ("machine = 3\n" + MODEL, r"machine is no list; write each as a \[\[machine\]\] table"),
    ],
)
def test_a_mistake_is_one_line_with_what_is_allowed(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said) as caught:
        load_fleet(written(tmp_path, text))
    assert "\n" not in str(caught.value)
