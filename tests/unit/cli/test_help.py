"""Help says all that it has to say, as wide as the terminal is."""

from __future__ import annotations

import sys

import pytest

from geo_diloco.cli import app as cli


def help_of(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *arguments: str) -> str:
    monkeypatch.setattr(sys, "argv", ["geo-diloco", *arguments, "--help"])
    with pytest.raises(SystemExit):
        cli.main()
    return capsys.readouterr().out


def test_help_says_of_each_command_the_whole_first_sentence(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for group, last in (
        ((), "AutoModelForCausalLM.from_pretrained."),
        (("simulate",), "what your own fleet comes to."),
    ):
        commands = " ".join(help_of(capsys, monkeypatch, *group).partition("Commands:")[2].split())
        assert "..." not in commands and last in commands


def test_help_takes_the_width_there_is(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    widths = []
    for columns in ("80", "200"):
        monkeypatch.setenv("COLUMNS", columns)
        widths.append(max(map(len, help_of(capsys, monkeypatch, "join").splitlines())))
    assert widths[0] <= 80 < widths[1] <= cli.WIDTH_MAX


def test_help_does_not_show_commands_that_are_for_other_commands(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    said = help_of(capsys, monkeypatch, "bench")
    assert "  syncer " in said and "crowd-learners" not in said
