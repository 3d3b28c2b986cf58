"""An invite is pasted by people: what they can do to it on the way is what is tested."""

from __future__ import annotations

import base64
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from geo_diloco.errors import InviteError
from geo_diloco.manifest import RunId
from geo_diloco.runtime import invite as invite_module
from geo_diloco.runtime.invite import Invite, place_of

RUN = RunId("0123456789abcdef0123456789abcdef01234567")
BOOTSTRAPS = (
    "/ip4/203.0.113.5/tcp/31330/p2p/QmbkndtPSCXD7BvAtxtHwcKvWFafQipx4Sr9ePoY3EU5CC",
    "/dns4/boot.example.org/tcp/31330/p2p/12D3KooWFRzDuWq9aNHow52oo1HuwxG86TedExmUiu35jHLdNj8n",
    "/ip6/2001:db8::1/tcp/31330/p2p/12D3KooWFRzDuWq9aNHow52oo1HuwxG86TedExmUiu35jHLdNj8n",
)
INVITE = Invite(run=RUN, bootstraps=BOOTSTRAPS, token="a token", name="häuser")


def coded(body: bytes) -> str:
    """A string with the right checksum around any content."""
    return "gd1-" + base64.urlsafe_b64encode(invite_module._check(body) + body).decode().rstrip("=")


@given(
    token=st.text(st.characters(min_codepoint=32, max_codepoint=126), max_size=256),
    name=st.text(max_size=80).filter(str.isprintable),
    count=st.integers(1, 3),
)
def test_an_invite_reads_back_as_it_was_made(token: str, name: str, count: int) -> None:
    made = Invite(run=RUN, bootstraps=BOOTSTRAPS[:count], token=token, name=name)
    assert Invite.parse(made.to_string()) == made


def test_spaces_and_line_breaks_from_pasting_do_no_harm() -> None:
    text = INVITE.to_string()
    assert Invite.parse(f"  {text[:30]}\n  {text[30:70]}\r\n{text[70:]} \n") == INVITE


def test_an_invite_needs_no_quoting_in_a_shell() -> None:
    assert all(letter.isascii() and (letter.isalnum() or letter in "-_") for letter in INVITE.to_string())


def test_every_truncation_is_noticed() -> None:
    text = INVITE.to_string()
    for length in range(len(text)):
        with pytest.raises(InviteError):
            Invite.parse(text[:length])


@given(st.data())
def test_a_changed_letter_is_noticed(data: st.DataObject) -> None:
    text = INVITE.to_string()
    at = data.draw(st.integers(4, len(text) - 2))  # the last letter holds bits that mean nothing
    letter = data.draw(st.sampled_from("abcXYZ019-_").filter(lambda other: other != text[at]))
    with pytest.raises(InviteError, match="checksum"):
        Invite.parse(text[:at] + letter + text[at + 1 :])


@given(st.text(max_size=200))
def test_any_text_is_read_or_refused_in_one_line(text: str) -> None:
    with pytest.raises(InviteError) as refused:
        Invite.parse(text)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "does not begin with 'gd1-'"),
        ("hello", "does not begin with 'gd1-'"),
        ("gd2-abcd", "version 'gd2'"),
        ("gd1-", "cut short"),
        ("gd1-abc%", "characters that no invite has"),
        ("gd1-a", "cut short"),
        ("gd1-" + "a" * 9000, "at most 8192"),
        (coded(b"not json"), "unreadable"),
        (coded(b"[" * 4000), "unreadable"),
        (coded(b"[]"), "unreadable"),
        (coded(b'{"run":7,"bootstraps":[]}'), "must be text"),
        (coded(b'{"run":"' + RUN.encode() + b'","bootstraps":"/ip4"}'), "list of addresses"),
        (coded(b'{"run":"' + RUN.encode() + b'","bootstraps":[]}'), "0 bootstraps"),
        (coded(b'{"run":"' + RUN.encode() + b'","bootstraps":["/ip4/1.2.3.4/tcp/1"]}'), "not of the form"),
        (coded(b'{"run":"xyz","bootstraps":[]}'), "not 40 hex"),
        (coded(b'{"run":"","bootstraps":[],"later":1}'), "unknown field 'later'"),
    ],
)
def test_each_fault_has_its_own_reason(text: str, reason: str) -> None:
    with pytest.raises(InviteError, match=reason):
        Invite.parse(text)


def test_a_bad_invite_is_never_handed_out() -> None:
    for wrong in ({"token": "a\nb"}, {"token": "t" * 257}, {"name": "\x1b[31m"}, {"bootstraps": ("localhost:31330",)}):
        with pytest.raises(InviteError):
            Invite(**{"run": RUN, "bootstraps": BOOTSTRAPS, **wrong})


def test_the_token_is_not_printed() -> None:
    assert "a token" not in repr(INVITE)


@pytest.mark.parametrize(
    "where",
    ["missing", "gone/run", "gd/run", "", "loop", "file", "/dev/null", "x" * 5000],
    ids=lambda where: repr(where[:20]),
)
def test_what_is_neither_a_folder_nor_an_invite_is_told_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """Most who mistype a folder have no invite to paste."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "file").write_text("")
    with pytest.raises(InviteError, match=r"^'[^']{0,60}' is neither a folder on this machine nor an invite, gd1-"):
        place_of(where)


def test_an_invite_that_is_cut_is_told_as_that(tmp_path: Path) -> None:
    assert place_of(str(tmp_path)) == tmp_path
    whole = INVITE.to_string()
    assert place_of(f" {whole} ") == INVITE
    for cut in (whole[:-7], "gd2-abc"):
        with pytest.raises(InviteError, match=r"^invite: "):
            place_of(cut)
