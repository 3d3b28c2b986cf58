"""One peer of hivemind's side of the averaging race: a `hivemind.DecentralizedAverager` in a process of its own.

It does what it is told by lines on standard input, answers each with a line of JSON, and ends when the input does. What
it averages is noise, new for each round: of four peers' noise the mean has half the spread, so whoever holds anything
but the mean of all is found out by that.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from typing import Any

NUM_TENSORS = 48
MATCHMAKING_S, REQUEST_S = 3.0, 1.0
"""A group of the full size begins at once; the first is only how long a smaller one would wait."""
FORM_S, ROUND_S = 60.0, 300.0
SPREAD_OFF = 0.05
"""What encoding may change of it; without one of four peers it would be 15 % off."""
_LOOK_S = 0.002


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--address", required=True)
    parser.add_argument("--join", default="", help="of a peer that is there already")
    parser.add_argument("--peers", type=int, required=True)
    parser.add_argument("--parameters", type=int, required=True)
    parser.add_argument("--compression", choices=("FLOAT16", "UNIFORM_8BIT"), required=True)
    parser.add_argument("--part-bytes", type=int, required=True)
    asked = parser.parse_args()

    import hivemind
    import torch

    from geo_diloco.cli.bench_hivemind import averager_codec

    torch.set_num_threads(1)
    known = [asked.join] if asked.join else None
    listen = [f"/ip4/{asked.address}/tcp/0"]
    dht = hivemind.DHT(known, start=True, host_maddrs=listen, startup_timeout=120)
    _answer(address=str(dht.get_visible_maddrs()[0]))
    try:
        averager = hivemind.DecentralizedAverager(
            [torch.empty(asked.parameters // NUM_TENSORS) for _ in range(NUM_TENSORS)],
            dht,
            start=True,
            prefix="race",
            target_group_size=asked.peers,
            min_group_size=asked.peers,
            min_matchmaking_time=MATCHMAKING_S,
            request_timeout=REQUEST_S,
            compression=averager_codec(asked.compression),
            part_size_bytes=asked.part_bytes,
            allow_state_sharing=False,
        )
        try:
            _answer(ready=True)
            _obey(averager, num_peers=asked.peers)
        finally:
            averager.shutdown()
    finally:
        dht.shutdown()


def _obey(averager: Any, *, num_peers: int) -> None:
    control: Any = None
    for line in sys.stdin:
        order = line.strip()
        if order == "form":
            control = _form(averager)
        elif order == "average":
            began_at = time.monotonic()
            control.allow_allreduce()
            gathered = control.result(timeout=ROUND_S)
            ended_at = time.monotonic()
            with averager.get_tensors() as tensors:
                spread = float(sum(each.square().mean() for each in tensors) / len(tensors)) ** 0.5
            whole = len(gathered) == num_peers and abs(spread * num_peers**0.5 - 1.0) < SPREAD_OFF
            _answer(began_at=began_at, ended_at=ended_at, whole=whole)
        else:
            return


def _form(averager: Any) -> Any:
    """The group is there before it is told to average: what is left then is the averaging alone."""
    from hivemind.averaging.control import AveragingStage

    with averager.get_tensors() as tensors:
        for each in tensors:
            each.normal_()
    _answer(filled=True)
    began_at = time.monotonic()
    control = averager.step(wait=False, require_trigger=True, timeout=FORM_S)
    while control.stage != AveragingStage.AWAITING_TRIGGER and not control.done():
        time.sleep(_LOOK_S)
    _answer(formed_s=time.monotonic() - began_at)
    return control


def _answer(**values: Any) -> None:
    print(json.dumps(values), flush=True)


if __name__ == "__main__":
    main()
