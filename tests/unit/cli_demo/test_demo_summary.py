"""Adding up a run from its chain, its tapes and its learners' last words."""

from __future__ import annotations

import io
import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from geo_diloco.cli.demo_files import create_demo_files
from geo_diloco.cli.demo_summary import DemoSummary, digests_agree, print_summary, summarize
from geo_diloco.manifest import (
    BootId,
    BranchId,
    Digest,
    FragmentId,
    ModelSpec,
    PeerId,
    RunId,
    RunManifest,
    Seq,
    Term,
    Version,
)
from geo_diloco.protocol.messages import (
    BlobRef,
    Commit,
    Entry,
    EntryHeader,
    Finished,
    Found,
    Open,
    Participant,
    Record,
)
from geo_diloco.runtime.identity import Identity
from geo_diloco.runtime.store import ChainStore
from geo_diloco.runtime.wire import seal_entry
from geo_diloco.tape import FragmentBalance, LearnerBalance, TokenSummary
from geo_diloco.tape.figures import chain_figures, token_figures

NUM_ELEMENTS = (300, 100)
KEYS_OF_THE_ISSUE = [
    "heldout_before",
    "heldout_after",
    "tokens_trained",
    "tokens_merged",
    "tokens_in_flight",
    "tokens_carried",
    "tokens_dropped",
    "commits",
    "participants_mean",
    "bytes_per_param_up",
    "bytes_per_param_down",
    "digests_equal",
    "run_dir",
]


def digest(number: int) -> Digest:
    return Digest(f"{number:064x}")


def header(seq: int) -> EntryHeader:
    return EntryHeader(
        run=RunId("a" * 40), branch=BranchId("b" * 64), term=Term(1), seq=Seq(seq), prev=digest(1000 + seq)
    )


def participant(number: int, size: int) -> Participant:
    return Participant(
        peer=PeerId(f"{number:064x}"),
        base=digest(0),
        base_version=Version(0),
        first_step=0,
        last_step=24,
        steps=24,
        tokens=24576,
        tokens_unmerged=24576,
        contribution=BlobRef(digest(number), size),
        weight=1.0,
        norm=1.0,
    )


def commit(seq: int, fragment: int, version: int, *, sizes: tuple[int, ...], update: int) -> Commit:
    return Commit(
        header=header(seq),
        fragment=FragmentId(fragment),
        version=Version(version),
        round=seq,
        attempt=0,
        update=BlobRef(digest(seq), update),
        state_digest=digest(100 * fragment + version),
        momentum_digest=digest(9),
        eta=0.7,
        mu=0.5,
        participants=tuple(participant(number, size) for number, size in enumerate(sizes)),
        left_out=(),
        quorum_wait_ms=100 * seq,
        grace_ms=10 * seq,
        close_reason="all here",
        rbar=1.0,
        rho=None,
        tokens_total=0,
        progress=0.5,
    )


FOUND = Found(
    header=header(0),
    boot=BootId("c" * 16),
    state_digests=(digest(0), digest(100)),
    momentum_digests=(digest(9), digest(9)),
    layout_digest=digest(7),
    num_elements=NUM_ELEMENTS,
    roster=(),
)
OPEN = Open(header=header(1), syncer=PeerId("d" * 64), boot=BootId("c" * 16), address="127.0.0.1:1", votes=())
FINISHED = Finished(header=header(9), reason="time", tokens_total=1)


def record(seq: int, loss: float) -> Record:
    return Record(header=header(seq), measured_seq=Seq(seq - 1), heldout_loss=loss)


def chain(*more: Entry) -> list[Entry]:
    return [
        FOUND,
        OPEN,
        record(2, 5.6),
        commit(3, 0, 1, sizes=(150, 170, 160), update=150),
        commit(4, 1, 1, sizes=(50,), update=60),
        record(5, 3.0),
        commit(6, 0, 2, sizes=(140, 180), update=150),
        record(7, 2.0),
        *more,
    ]


def test_a_chain_adds_up() -> None:
    figures = chain_figures(chain(FINISHED))
    assert figures.heldout == (5.6, 3.0, 2.0)
    assert (figures.commits, figures.participants_mean, figures.finished) == (3, 2.0, True)
    assert figures.bytes_per_param_up == (150 + 170 + 160 + 50 + 140 + 180) / (300 * 3 + 100 + 300 * 2)
    assert figures.bytes_per_param_down == (150 + 60 + 150) / (300 + 100 + 300)
    assert figures.quorum_wait_ms_mean == (300 + 400 + 600) / 3
    assert figures.grace_ms_mean == (30 + 40 + 60) / 3
    assert figures.digests == ({0: digest(0), 1: digest(1), 2: digest(2)}, {0: digest(100), 1: digest(101)})


def test_no_chain_is_all_nothing() -> None:
    figures = chain_figures([])
    assert (figures.commits, figures.participants_mean, figures.heldout, figures.finished) == (0, 0.0, (), False)
    assert not chain_figures(chain()).finished


def word(*held: tuple[int, int]) -> dict[str, Any]:
    return {"versions": [version for version, _ in held], "state_digests": [digest(number) for _, number in held]}


def test_digests_agree_only_if_every_learner_holds_the_chains_theta() -> None:
    finished, unfinished = chain_figures(chain(FINISHED)), chain_figures(chain())
    at_head, behind = word((2, 2), (1, 101)), word((1, 1), (0, 100))
    assert digests_agree(finished, [at_head, at_head])
    assert digests_agree(unfinished, [at_head, behind])
    assert not digests_agree(finished, [at_head, behind]), "a finished run is held to its end by all"
    assert not digests_agree(finished, [at_head, word((2, 3), (1, 101))]), "another Theta"
    assert not digests_agree(unfinished, [word((1, 2), (1, 101))]), "another version's Theta"
    assert not digests_agree(unfinished, [word((3, 2), (1, 101))]), "a version the chain doesn't have"


@pytest.mark.parametrize(
    "words", [[], [None], [{}], [{"versions": 3, "state_digests": []}], [word((2, 2))], [word((2, 2), (1, 101)), None]]
)
def test_a_missing_or_odd_last_word_is_no_agreement(words: list[Any]) -> None:
    assert not digests_agree(chain_figures(chain()), words)


def summary_of(*learners: tuple[FragmentBalance, ...]) -> TokenSummary:
    balances = tuple(LearnerBalance(peer=PeerId(str(n)), fragments=each) for n, each in enumerate(learners))
    return TokenSummary(trained=-1, merged=-1, in_flight=-1, carried=-1, dropped={}, learners=balances)


def test_token_terms_are_weighted_by_fragment_size() -> None:
    one = (
        FragmentBalance(trained=100, merged=80, in_flight=5, carried=10, dropped=Counter(shrunk=5)),
        FragmentBalance(trained=100, merged=40, in_flight=30, carried=10, dropped=Counter(shrunk=5, crashed=15)),
    )
    figures = token_figures(summary_of(one), NUM_ELEMENTS)
    assert (figures.trained, figures.merged) == (100, (300 * 80 + 100 * 40) // 400)
    assert figures.in_flight in (11, 12) and figures.carried in (10, 11)
    assert set(figures.dropped_by_reason) == {"shrunk", "crashed"}
    assert figures.balance


amounts = st.integers(min_value=0, max_value=10**7)
fragments = st.builds(
    lambda merged, in_flight, carried, dropped: FragmentBalance(
        trained=merged + in_flight + carried + sum(dropped.values()),
        merged=merged,
        in_flight=in_flight,
        carried=carried,
        dropped=Counter(dropped),
    ),
    amounts,
    amounts,
    amounts,
    st.dictionaries(st.sampled_from(["shrunk", "crashed", "restarted"]), amounts),
)


@given(
    learners=st.lists(st.tuples(fragments, fragments), max_size=4),
    num_elements=st.tuples(st.integers(1, 10**6), st.integers(1, 10**6)),
)
def test_terms_that_balance_exactly_add_up_exactly(
    learners: list[tuple[FragmentBalance, FragmentBalance]], num_elements: tuple[int, int]
) -> None:
    figures = token_figures(summary_of(*learners), num_elements)
    dropped = figures.dropped_by_reason
    assert figures.balance
    assert figures.trained == figures.merged + figures.in_flight + figures.carried + sum(dropped.values())
    own = sum(n * f.carried for each in learners for n, f in zip(num_elements, each, strict=True)) / sum(num_elements)
    assert abs(figures.carried - own) <= 1


def test_tokens_that_are_nowhere_are_neither_hidden_nor_made_up() -> None:
    lost = (FragmentBalance(trained=100, merged=60), FragmentBalance(trained=100, merged=60))
    figures = token_figures(summary_of(lost), NUM_ELEMENTS)
    assert not figures.balance
    assert (figures.trained, figures.merged, figures.in_flight, figures.carried) == (100, 60, 0, 0)


def summary(**changes: Any) -> DemoSummary:
    values: dict[str, Any] = {
        "heldout_before": 5.6,
        "heldout_after": 2.0,
        "tokens_trained": 1000,
        "tokens_merged": 900,
        "tokens_in_flight": 30,
        "tokens_carried": 20,
        "tokens_dropped": 50,
        "commits": 12,
        "participants_mean": 3.5,
        "bytes_per_param_up": 0.46,
        "bytes_per_param_down": 0.47,
        "digests_equal": True,
        "run_dir": "/a place/demo",
        "finished": True,
        "learners": 4,
        "dropped_by_reason": {"crashed": 50},
        "tokens_balance": True,
        "bytes_up": 1_000_000,
        "bytes_down": 4_000_000,
        "quorum_wait_ms_mean": 250.0,
        "grace_ms_mean": 40.0,
        "elapsed_s": 130.0,
    }
    return DemoSummary(**(values | changes))


def printed(found: DemoSummary) -> str:
    console = Console(file=io.StringIO(), width=60)
    print_summary(console, found)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert isinstance(text, str)
    return text


def test_the_printed_summary_names_every_term_and_the_next_command() -> None:
    text = printed(summary())
    for fact in ("5.600 -> 2.000", "12", "3.50", "0.460", "0.470", "1,000", "900", "30", "20", "50", "crashed 50"):
        assert fact in text, fact
    assert "geo-diloco export '/a place/demo' --to model" in text
    assert "NO" not in text


def test_what_does_not_agree_is_shouted() -> None:
    assert printed(summary(digests_equal=False)).count("NO") == 1
    assert printed(summary(tokens_balance=False)).count("NO") == 1
    assert "-> - nats" in printed(summary(heldout_after=None))


def test_the_json_has_the_keys_that_scripts_read_first() -> None:
    assert list(summary().to_json())[: len(KEYS_OF_THE_ISSUE)] == KEYS_OF_THE_ISSUE
    assert json.loads(json.dumps(summary().to_json())) == summary().to_json()


def test_a_demo_ended_before_its_run_was_founded_sums_up_to_nothing(tmp_path: Path) -> None:
    found = summarize(create_demo_files(tmp_path / "demo"), status=None, elapsed_s=1.0)
    assert (found.commits, found.tokens_trained, found.heldout_before, found.digests_equal) == (0, 0, None, False)


def test_a_runs_folder_is_read_and_its_signatures_checked(tmp_path: Path) -> None:
    files = create_demo_files(tmp_path / "demo")
    founder = Identity.generate()
    manifest = RunManifest(model=ModelSpec(config={"model_type": "llama"}), founder=founder.peer_id, nonce="1" * 32)
    (files.root / "manifest.json").write_bytes(manifest.canonical_bytes())
    store, previous, branch = ChainStore(files.root / "chain.jsonl"), "", ""
    for seq, entry in enumerate(signed_chain(founder.peer_id)):
        head = EntryHeader(
            run=manifest.run_id(), branch=BranchId(branch), term=Term(1), seq=Seq(seq), prev=Digest(previous)
        )
        signed = seal_entry(replace(entry, header=head), founder)
        store.append(signed)
        previous, branch = signed.digest, branch or signed.digest
    store.close()
    files.learner(1).mkdir()
    (files.learner(1) / "summary.json").write_text(json.dumps(word((1, 1), (0, 100))))
    found = summarize(files, status=None, elapsed_s=2.0)
    assert (found.heldout_before, found.heldout_after, found.commits) == (5.6, None, 1)
    assert found.digests_equal and found.finished and found.learners == 1
    assert found.run_dir == str(files.root)


def signed_chain(syncer: PeerId) -> list[Entry]:
    opened = Open(header=header(1), syncer=syncer, boot=BootId("c" * 16), address="127.0.0.1:1", votes=())
    return [FOUND, opened, record(2, 5.6), commit(3, 0, 1, sizes=(150,), update=150), FINISHED]
