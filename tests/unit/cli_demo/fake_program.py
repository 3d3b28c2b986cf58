"""Stands in for `python -m geo_diloco` in the director's tests: same arguments, same lines, no run behind it.

`start` serves a status over real HTTP that is finished once every learner has reported (a file in the founder's
folder) or when told so; `join` leaves when it is. What a child should do wrong comes in FAKE_MISDEED.
"""

from __future__ import annotations

import http.server
import json
import os
import signal
import sys
import threading
import time
from pathlib import Path

LIFE_S = 300.0
"""If nobody ends it; far longer than any test takes on the busiest machine."""


def main(command: str, *arguments: str) -> int:
    misdeed = os.environ.get("FAKE_MISDEED", "")
    stopped = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stopped.set())
    print(f"{command} begins", flush=True)
    if misdeed == f"{command} dies":
        print("the reason why", flush=True)
        return 7
    flags = dict(zip(arguments, [*arguments[1:], ""], strict=True))
    if command == "bootstrap":
        print(json.dumps({"maddrs": ["/ip4/127.0.0.1/tcp/1/p2p/x"]}), flush=True)
        stopped.wait(LIFE_S)
    elif command == "start":
        return found(Path(flags["--run-dir"]), flags["--bootstrap"], stopped)
    elif command == "join":
        return join(arguments[0], Path(flags["--run-dir"]), stopped, misdeed)
    return 0


def found(run_dir: Path, maddr: str, stopped: threading.Event) -> int:
    assert maddr == "/ip4/127.0.0.1/tcp/1/p2p/x"

    class Answer(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            steps = len(list(run_dir.glob("learner-*/steps")))
            finished = (run_dir / "finish").exists()
            status = {
                "seq": 3,
                "finished": finished,
                "progress": 1.0 if finished else 0.5 if steps == 2 else 0.0,  # nobody is killed before it has begun
                "learners": [{"peer": "ab" * 32, "step": 1, "connected": True}] * steps,
            }
            body = json.dumps(status).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Answer) as http_side:
        thread = threading.Thread(target=http_side.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        thread.start()
        address = f"127.0.0.1:{http_side.server_address[1]}"
        print(json.dumps({"invite": str(run_dir), "run": "r", "run_dir": str(run_dir), "http": address}), flush=True)
        stopped.wait(LIFE_S)
        http_side.shutdown()
    return 0


def join(invite: str, run_dir: Path, stopped: threading.Event, misdeed: str) -> int:
    run_dir.mkdir(exist_ok=True)
    starts = run_dir / "steps"
    again = starts.exists()
    starts.touch()
    if misdeed == "learners leave early":
        return 0
    deadline = time.monotonic() + LIFE_S
    while not (Path(invite) / "finish").exists() and not stopped.is_set() and time.monotonic() < deadline:
        if misdeed != "run goes on" and (misdeed != "restart ends the run" or again):
            (Path(invite) / "finish").touch()
        stopped.wait(0.02)
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
