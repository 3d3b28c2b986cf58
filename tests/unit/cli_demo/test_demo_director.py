"""The order of things, with a program that only looks like geo_diloco."""

from __future__ import annotations

import subprocess
import sys
import threading
import types
from collections.abc import Callable
from pathlib import Path

import pytest

from geo_diloco.cli.demo import DemoOptions, Interruption
from geo_diloco.cli.demo_director import Director, _Stages
from geo_diloco.cli.demo_files import DemoFiles, create_demo_files
from geo_diloco.cli.demo_processes import ChildFailed, Children
from geo_diloco.cli.demo_status import read_status
from geo_diloco.cli.demo_view import Moment
from geo_diloco.manifest import RunManifest

FAKE = Path(__file__).with_name("fake_program.py")


class Seen:
    """A view that remembers, and can act on what it sees."""

    def __init__(self) -> None:
        self.phases: list[str] = []
        self.said: list[str] = []
        self.on_show: Callable[[Moment], None] = lambda moment: None

    def __enter__(self) -> Seen:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def show(self, moment: Moment) -> None:
        if not self.phases or self.phases[-1] != moment.phase:
            self.phases.append(moment.phase)
        self.on_show(moment)

    def say(self, text: str) -> None:
        self.said.append(text)


@pytest.fixture(autouse=True)
def preset(monkeypatch: pytest.MonkeyPatch) -> None:
    """The real preset lives beside torch."""
    stand_in = types.ModuleType("geo_diloco.training.presets")
    stand_in.demo_manifest = RunManifest  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "geo_diloco.training.presets", stand_in)


@pytest.fixture
def files(tmp_path: Path) -> DemoFiles:
    return create_demo_files(tmp_path / "demo")


def direct(
    files: DemoFiles,
    view: Seen,
    monkeypatch: pytest.MonkeyPatch,
    *,
    misdeed: str = "",
    chaos: bool = False,
    interruption: Interruption | None = None,
) -> Director:
    monkeypatch.setenv("FAKE_MISDEED", misdeed)
    interruption = interruption or Interruption()
    program = (sys.executable, "-I", "-S", str(FAKE))
    options = DemoOptions(num_learners=2, chaos=chaos)
    with Children(files.logs, program=program, interrupted=interruption.asked) as children:
        director = Director(options, files, children, view, interruption)
        director.run()
        assert not [name for name, child in children._running.items() if child.status is None]
    return director


def test_a_demo_goes_from_bootstrap_to_the_end_of_the_run(files: DemoFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    view = Seen()
    director = direct(files, view, monkeypatch)
    assert view.phases[0] == "starting the bootstrap"
    assert view.phases[1] == "founding the run"
    assert view.phases[-1] == "ending the founder and the bootstrap"
    assert director.last_status is not None and director.last_status.finished
    assert files.manifest.is_file()
    logs = sorted(path.name for path in files.logs.iterdir())
    assert logs == ["bootstrap.log", "founder.log", "learner-1.log", "learner-2.log"]


@pytest.mark.parametrize(
    ("misdeed", "name"), [("bootstrap dies", "bootstrap"), ("start dies", "founder"), ("join dies", "learner-[12]")]
)
def test_a_child_that_dies_ends_the_demo_by_name(
    files: DemoFiles, monkeypatch: pytest.MonkeyPatch, misdeed: str, name: str
) -> None:
    with pytest.raises(ChildFailed, match=f"^{name} ended .*exit status 7.*{name}.log") as caught:
        direct(files, Seen(), monkeypatch, misdeed=misdeed)
    assert caught.value.child.last_lines()[-1] == "the reason why"


def test_learners_that_leave_an_unfinished_run_are_a_failure(files: DemoFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ChildFailed, match="the run is not finished"):
        direct(files, Seen(), monkeypatch, misdeed="learners leave early")


def test_an_interrupted_demo_asks_all_to_leave_and_is_no_failure(
    files: DemoFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    view, interruption = Seen(), Interruption()

    def interrupt(moment: Moment) -> None:
        if moment.status is not None and moment.status.learners:
            interruption.on_signal(2, None)
            view.on_show = lambda moment: None

    view.on_show = interrupt
    direct(files, view, monkeypatch, misdeed="run goes on", interruption=interruption)
    assert view.phases[-1] == "interrupted, leaving"
    assert view.said == []
    assert interruption.asked.is_set() and not interruption.again.is_set()


def test_an_interruption_while_starting_leaves_nothing_behind(
    files: DemoFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    view, interruption = Seen(), Interruption()

    def interrupt(moment: Moment) -> None:
        if moment.phase == "founding the run":
            interruption.asked.set()

    view.on_show = interrupt
    direct(files, view, monkeypatch, interruption=interruption)
    assert view.phases[-1] == "interrupted, leaving"


def test_chaos_kills_the_last_learner_midway_and_starts_it_again(
    files: DemoFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("geo_diloco.cli.demo_director._Chaos.RESTART_AFTER_S", 0.0)
    view = Seen()
    direct(files, view, monkeypatch, misdeed="restart ends the run", chaos=True)
    assert len(view.said) == 2 and all("learner-2" in text for text in view.said)
    assert (files.logs / "learner-2.log").read_text().count("join begins") == 2
    assert (files.logs / "learner-1.log").read_text().count("join begins") == 1


def test_the_second_signal_hurries() -> None:
    interruption = Interruption(threading.Event(), threading.Event())
    interruption.on_signal(2, None)
    assert interruption.asked.is_set() and not interruption.again.is_set()
    interruption.on_signal(2, None)
    assert interruption.again.is_set()


def test_every_stage_of_a_run_has_a_bound() -> None:
    stages = _Stages(minutes=1.0)
    began = stages._began_at
    assert stages.phase == "learners are joining"
    assert stages.overdue(began + 100) == ""
    assert "no learner train" in stages.overdue(began + 181)
    stages.see(read_status(b'{"learners": [{"step": 1}]}'), began + 20)
    assert stages.phase == "training"
    assert stages.overdue(began + 181) == ""
    assert "did not finish" in stages.overdue(began + 1000)
    stages.see(read_status(b'{"finished": true}'), began + 80)
    assert stages.phase == "finished, learners are leaving"
    assert stages.overdue(began + 124) == ""
    assert "did not leave" in stages.overdue(began + 126)


def test_nothing_of_the_demo_needs_torch_or_hivemind() -> None:
    code = (
        "import sys, importlib, pathlib, geo_diloco.cli.demo as demo\n"
        "light = set(sys.modules)\n"
        "for path in pathlib.Path(demo.__file__).parent.glob('demo*.py'):\n"
        "    importlib.import_module('geo_diloco.cli.' + path.stem)\n"
        "heavy = {'torch', 'hivemind', 'transformers', 'aiohttp', 'numpy'}\n"
        "raise SystemExit(' '.join(sorted(heavy & set(sys.modules) | {'rich.live', 'urllib.request'} & light)) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
