"""A fault plan as a person writes it, and what it is told when it is wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

from geo_diloco.config import Fault, fault_plan_text, load_fault_plan
from geo_diloco.errors import ConfigError

CRASH = '[[fault]]\nlearner = 2\nkind = "crash"\nfrom_s = 1.5\n'


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "plan.toml"
    path.write_text(text)
    return path


def test_faults_come_in_the_order_of_the_file_in_milliseconds(tmp_path: Path) -> None:
    plan = load_fault_plan(written(tmp_path, CRASH + CRASH.replace("crash", "cut") + "until_s = 2\n"), num_learners=2)
    assert plan.faults == (
        Fault(learner=2, kind="crash", from_s=1.5),
        Fault(learner=2, kind="cut", from_s=1.5, until_s=2.0),
    )
    assert [(each.from_ms, each.until_ms) for each in plan.faults] == [(1500, None), (1500, 2000)]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", r"plan.toml: no faults; write each as a \[\[fault\]\] table"),
        ("fault = 3\n", "no faults"),
        (CRASH + "[[faults]]\n", r"faults is no known key; a fault plan is a list of \[\[fault\]\] tables"),
        (
            CRASH + CRASH.replace("crash", "crsh"),
            'fault 2: kind = "crsh"; allowed is one of "crash", "freeze", "cut", "slice"',
        ),
        (CRASH.replace("learner", "lerner"), "fault 1: lerner = 2 is no known key; did you mean learner"),
        (CRASH.replace("learner = 2", "learner = 3"), "learner = 3; allowed is a whole number from 1 to 2"),
        (CRASH.replace("learner = 2", "learner = 0"), "learner = 0; allowed is a whole number from 1"),
        (CRASH.replace("1.5", "-1"), "from_s = -1; allowed is a number from 0.0"),
        (CRASH + "until_s = 1.5\n", r"until_s = 1.5; allowed is a number above from_s \(1.5\)"),
        (CRASH + "until_s = 1e306\n", r"until_s = 1e\+306; allowed is a number above from_s and up to 20000000"),
        (CRASH + 'until_s = "soon"\n', 'until_s = "soon"; allowed is a number above from_s'),
        ("[[fault\n", "plan.toml: not TOML"),
        (CRASH.replace("crash", "slice"), 'kind = "slice"; slice = NUMBER goes with kind = "slice" and only with it'),
        (CRASH + "slice = 1\n", 'kind = "crash"; slice = NUMBER goes with'),
        (CRASH.replace("crash", "slice") + "slice = 1\n", "slice = 1; allowed is a whole number from 1 to slices = 0"),
        ("repeat_s = 1.5\n" + CRASH, "from_s = 1.5; allowed is less than repeat_s = 1.5"),
        ("repeat_s = 0\n" + CRASH, "repeat_s = 0; allowed is a number from 0.001"),
        ("upscale_s = -1\n" + CRASH, "upscale_s = -1; allowed is a number from 0.0"),
        ('slices = "many"\n' + CRASH, 'slices = "many"; allowed is a whole number from 0'),
    ],
)
def test_a_mistake_is_one_line(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said) as caught:
        load_fault_plan(written(tmp_path, text), num_learners=2)
    assert "\n" not in str(caught.value)


def test_a_plan_says_what_holds_for_all_of_its_faults(tmp_path: Path) -> None:
    text = (
        "slices = 4\nrepeat_s = 9\ndownscale_s = 0.25\nupscale_s = 0\n"
        + CRASH.replace("crash", "slice")
        + "slice = 4\n"
    )
    plan = load_fault_plan(written(tmp_path, text + CRASH), num_learners=2)
    assert (plan.slices, plan.repeat_s, plan.downscale_s, plan.upscale_s) == (4, 9.0, 0.25, 0.0)
    assert [fault.slice for fault in plan.of_slices] == [4]
    assert [fault.kind for fault in plan.of_learners] == ["crash"]
    assert load_fault_plan(written(tmp_path, fault_plan_text(plan, ["a comment"])), num_learners=2) == plan
