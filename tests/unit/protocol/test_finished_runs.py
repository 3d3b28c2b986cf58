"""A run that is over is over for whoever comes back to it."""

from __future__ import annotations

from geo_diloco.protocol.effects import PersistAccounts, RunFinished
from geo_diloco.protocol.events import Resumed, Saved
from tests.support.single import Learning, adopt, begun, known, only, take


def test_a_learner_that_saved_after_the_end_hears_of_the_end_again() -> None:
    """Taken up behind the last entry, its core would never be told, and train on for ever."""
    learning, chain = begun()
    take(learning, chain.commit(0))
    learning.train()
    adopt(learning, 1)
    assert len(only(known(learning, chain.finished()), RunFinished)) == 1
    known(learning, chain.open(term=2))
    (persist,) = only(learning.give(Saved(1, learning.step, learning.tokens)), PersistAccounts)
    again = Learning(persist.resume_at)
    again.give(Resumed(persist.step, persist.tokens, persist.accounts, 0, 0))
    again.connect()
    after = [event for event in chain.events if event.entry.header.seq > persist.resume_at.seq]
    assert len(only(known(again, *after), RunFinished)) == 1
