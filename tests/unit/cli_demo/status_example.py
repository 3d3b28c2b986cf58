"""A status as the founder gives it."""

from __future__ import annotations

from typing import Any

STATUS: dict[str, Any] = {
    "run": "r" * 40,
    "name": "demo",
    "peer": "a" * 64,
    "role": "syncer",
    "term": 1,
    "seq": 42,
    "finished": False,
    "heldout": [[1, 5.6, 0.1], [30, 3.25, 20.0]],
    "tokens_total": 1234567,
    "commits": 39,
    "progress": 0.25,
    "learners": [
        {
            "peer": "b" * 64,
            "host": "here",
            "connected": True,
            "step": 120,
            "tokens": 122880,
            "tokens_per_s": 15000.5,
            "loss": 3.5,
            "step_time_ms": 61.2,
            "doing": "training",
        },
        {"peer": "c" * 64, "host": "here", "connected": False, "step": 7, "tokens": 7168, "loss": None},
    ],
    "rounds": [
        {
            "round": 9,
            "fragment": 2,
            "version": 4,
            "participants": 3,
            "live": 4,
            "quorum_wait_ms": 210,
            "grace_ms": 90,
            "reason": "all expected are here",
        }
    ],
    "waiting": [{"fragment": 3, "reason": "not due for 4 steps"}],
    "bytes_in": 2_400_000,
    "bytes_out": 9_600_000,
    "bytes_per_param_up": 0.46,
    "bytes_per_param_down": 0.47,
    "uptime_s": 31.5,
}
