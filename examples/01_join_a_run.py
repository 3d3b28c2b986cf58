"""Join a run from your own training script.

    geo-diloco start run.toml                  # elsewhere: founds a run and prints its invite
    python examples/01_join_a_run.py INVITE    # here, and on as many machines as there are

The loop is yours: model, optimizer, loss, logging. The run needs one line of it, `learner.step`, which never waits
for the network. Ctrl-C leaves the run cleanly; start the script again and it goes on from this machine's own disk.
"""

from __future__ import annotations

import sys

import torch

import geo_diloco


def main(invite: str) -> None:
    with geo_diloco.join(invite) as peer:  # starts the node in a background thread
        model = peer.build_model()  # as the manifest says; an instance of your own with the same parameters will do
        inner_optimizer = torch.optim.AdamW(model.parameters(), lr=peer.manifest.inner.learning_rate)
        learner = peer.learner(model, inner_optimizer)  # adopts Theta into the model
        for batch in peer.data():  # int64 [batch, sequence]; or your own loader
            loss = model(input_ids=batch, labels=batch).loss
            loss.backward()
            inner_optimizer.step()
            inner_optimizer.zero_grad()
            if learner.num_steps % 50 == 0:
                print(f"step {learner.num_steps}: loss {loss.item():.3f}", flush=True)
            if learner.step(tokens=batch.numel(), loss=loss):  # True when the run is done
                break
        print(f"done after {learner.num_steps} steps, {learner.num_tokens} tokens: {learner.finish_reason}")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python examples/01_join_a_run.py INVITE")
    main(sys.argv[1])
