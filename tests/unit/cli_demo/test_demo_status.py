"""Reading the founder's status, over real HTTP."""

from __future__ import annotations

import http.server
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from geo_diloco.cli import demo_status
from geo_diloco.cli.demo_status import StatusPoller, read_status
from geo_diloco.errors import RemoteProtocolError

from .status_example import STATUS


@contextmanager
def http_status(*bodies: bytes) -> Iterator[tuple[str, list[str]]]:
    """Serves the bodies in turn, the last one for ever; gives the address and the paths asked for."""
    asked: list[str] = []

    class Answer(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = bodies[min(len(asked), len(bodies) - 1)]
            asked.append(self.path)
            self.send_response(200 if body else 500)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Answer) as http_side:
        thread = threading.Thread(target=http_side.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"127.0.0.1:{http_side.server_address[1]}", asked
        http_side.shutdown()
        thread.join()


def test_a_status_is_read_whole() -> None:
    status = read_status(json.dumps(STATUS).encode())
    assert (status.seq, status.term, status.commits, status.tokens_total) == (42, 1, 39, 1234567)
    assert status.heldout == ((1, 5.6, 0.1), (30, 3.25, 20.0))
    assert [(learner.step, learner.connected, learner.loss) for learner in status.learners] == [
        (120, True, 3.5),
        (7, False, None),
    ]
    assert status.rounds[0].quorum_wait_ms == 210 and status.rounds[0].reason == "all expected are here"
    assert status.waiting == ((3, "not due for 4 steps"),)


def test_missing_figures_read_as_nothing() -> None:
    status = read_status(b"{}")
    assert (status.seq, status.finished, status.learners, status.heldout) == (0, False, (), ())


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"[]",
        b"{",
        b"\xff\xfe",
        b'{"seq": "many"}',
        b'{"learners": 3}',
        b'{"learners": [3]}',
        b'{"heldout": [[1]]}',
        b"[" * 100_000,
    ],
)
def test_what_isnt_a_status_is_refused(data: bytes) -> None:
    with pytest.raises(RemoteProtocolError, match="status can't be read"):
        read_status(data)


def test_text_of_others_carries_no_control_characters_and_has_a_bound() -> None:
    learner = {"host": "a\x1b[2Jb\n", "doing": "x" * 10_000}
    found = read_status(json.dumps({"learners": [learner]}).encode()).learners[0]
    assert found.host == "a [2Jb "
    assert len(found.doing) == 300


def test_a_poll_asks_the_status_route_and_keeps_the_answer() -> None:
    with http_status(json.dumps(STATUS).encode()) as (address, asked):
        poller = StatusPoller(address)
        assert poller.poll() is poller.latest
        assert poller.latest is not None and poller.latest.seq == 42
        assert asked == ["/v1/status"]


def test_a_failed_poll_keeps_the_last_status_and_says_why() -> None:
    with http_status(json.dumps(STATUS).encode(), b"", b"nonsense", json.dumps(STATUS).encode()) as (address, _):
        poller = StatusPoller(address)
        first = poller.poll()
        assert poller.poll() is None and "500" in poller.failure
        assert poller.poll() is None and "can't be read" in poller.failure
        assert poller.latest is first
        assert poller.poll() is not None and poller.failure == ""
    assert poller.poll() is None and poller.failure != ""


def test_an_endless_status_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo_status, "STATUS_BYTES_MAX", 10)
    with http_status(json.dumps(STATUS).encode()) as (address, _):
        poller = StatusPoller(address)
        assert poller.poll() is None
        assert "more than 10 bytes" in poller.failure


def test_a_proxy_in_the_environment_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    with http_status(json.dumps(STATUS).encode()) as (address, _):
        assert StatusPoller(address).poll() is not None


def test_the_thread_polls_by_itself_and_ends_with_the_block() -> None:
    with http_status(json.dumps(STATUS).encode()) as (address, _):
        seen = threading.Event()

        class Watched(StatusPoller):
            def poll(self) -> demo_status.RunStatus | None:
                status = super().poll()
                seen.set()
                return status

        with Watched(address, interval_s=0.01) as poller:
            assert seen.wait(10)
        assert poller.latest is not None
    assert not [thread for thread in threading.enumerate() if thread.name == "demo-status"]
