"""Arms as a person types them: what they set, and what they are told when they can't be."""

from __future__ import annotations

import pytest

from geo_diloco.errors import ConfigError
from geo_diloco.sim.train.arms import Arm, arms_from, base_manifest
from geo_diloco.sim.train.fleet import Fleet, Machine

STEP_OF_FOUR = 4 * 1024


def arm(text: str, *, lockstep: bool = False) -> Arm:
    base = base_manifest(num_learners=4, tokens=1_000_000, lockstep=lockstep)
    return arms_from([text], base, num_learners=4)[0]


def test_keys_and_letters_of_the_paper_set_the_same_things() -> None:
    letters = arm("decoupled:K=2,H=12,P=3,tau=4,gamma=0.25,S_max=5,lr=1e-3").manifest
    words = arm(
        "decoupled:quorum=2,interval_steps=12,num_fragments=3,overlap_steps=4,grace_gamma=0.25,staleness_max=5,"
        "learning_rate=1e-3"
    ).manifest
    assert letters == words
    assert (letters.sync.quorum, letters.sync.interval_steps, letters.inner.learning_rate) == (2, 12, 1e-3)


def test_every_setting_of_a_decoupled_arm_reaches_the_manifest() -> None:
    manifest = arm(
        "decoupled:grace=off,kappa=0,merge=mean,late_form=paper,codec_up=int8,codec_down=none,block_up=128,eta=1,mu=0.9"
    ).manifest
    sync = manifest.sync
    assert (sync.grace, sync.kappa, sync.merge, sync.late_form) == (False, 0.0, "mean", "paper")
    assert (manifest.codec_up.name, manifest.codec_up.block, manifest.codec_down.name) == ("int8", 128, "none")
    assert (manifest.outer.eta, manifest.outer.mu) == (1.0, 0.9)
    other = arm("decoupled:cap=5,merge=rda-fragment,merge_embeddings=rda,token_weights=off,schedule_by=own").manifest
    assert (other.sync.carry_cap, other.sync.merge, other.sync.merge_embeddings) == (5.0, "rda-fragment", "rda")
    assert (other.sync.token_weights, other.inner.schedule_by) == (False, "own")
    assert arm("data-parallel:sequences=7").manifest.evaluation.sequences == 7
    assert arm("decoupled:grace=on").manifest.sync.grace is True


def test_the_budget_is_whole_inner_steps_of_all_learners_and_every_learner_has_a_share() -> None:
    base = base_manifest(num_learners=4, tokens=10_000, lockstep=False)
    assert base.stop.tokens == 2 * STEP_OF_FOUR
    assert base_manifest(num_learners=4, tokens=1, lockstep=False).stop.tokens == STEP_OF_FOUR
    assert base_manifest(num_learners=16, tokens=10**6, lockstep=False).data.num_shares == 16


def test_a_seed_changes_theta_0_and_the_data_and_nothing_else() -> None:
    one, two = arm("decoupled").seeded(1), arm("decoupled").seeded(2)
    assert (one.model.seed, one.data.seed, two.model.seed, two.data.seed) == (1, 1, 2, 2)
    assert (one.sync, one.inner, one.stop) == (two.sync, two.inner, two.stop)


def test_in_lockstep_all_learners_are_the_quorum() -> None:
    sync = arm("decoupled", lockstep=True).manifest.sync
    assert (sync.lockstep, sync.quorum) == (True, 4)


@pytest.mark.parametrize("kind", ["decoupled", "diloco", "data-parallel"])
def test_an_arm_may_have_thinner_links_and_the_same_manifest(kind: str) -> None:
    thin = arm(f"{kind}:links=0.01")
    assert (thin.links, thin.manifest) == (0.01, arm(kind).manifest)
    assert arm(kind).links == 1.0
    machine = Machine(step_ms=100, up_mbit=10.0, down_mbit=50.0, delay_ms=20)
    assert Fleet(machines=(machine,)).with_links(thin.links).machines == (
        Machine(step_ms=100, up_mbit=0.1, down_mbit=0.5, delay_ms=20),
    )


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("decupled", '"decupled" is no known arm; did you mean decoupled?'),
        ("sgd", '"sgd" is no known arm; allowed are decoupled, diloco, data-parallel'),
        ("decoupled:quorm=1", '"quorm" is no known key of decoupled; did you mean quorum?'),
        ("diloco:kappa=0", '"kappa" is no known key of diloco; allowed are eta, faults, final_share, interval_s'),
        ("data-parallel:H=3", '"H" is no known key of data-parallel; allowed are'),
        ("decoupled:kappa", '"kappa" is no setting; write key=value'),
        ("decoupled:quorum=1,K=2", "quorum is given twice; give it once"),
        ("decoupled:kappa=2", "sync.kappa = 2; allowed is a number from 0.0 to 1.0"),
        ("decoupled:quorum=1.5", "sync.quorum = 1.5; allowed is a whole number from 1 to 1024"),
        ("decoupled:codec_up=int7", 'codec.up.name = "int7"; allowed is one of "none", "bf16", "int8", "int4"'),
        ("decoupled:block_down=100", "codec.down.block = 100; allowed is a power of two"),
        ("decoupled:tau=24", r"sync.overlap_steps = 24; allowed is less than sync.interval_steps \(24\)"),
        ("decoupled:links=0", "links = 0; allowed is a number from 1e-06 to"),
        ("diloco:links=on", "links = true; allowed is a number from"),
        ("decoupled:links=2,links=3", "links is given twice; give it once"),
        ("decoupled:quorum=5", "quorum = 5; allowed is a whole number from 1 to 4, all learners"),
    ],
)
def test_a_mistake_is_one_line_that_names_the_arm(text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said.replace("?", r"\?")) as caught:
        arm(text)
    assert str(caught.value).startswith(f"--arm {text}: ")
    assert "\n" not in str(caught.value)


def test_a_smaller_quorum_is_refused_in_lockstep() -> None:
    with pytest.raises(ConfigError, match="quorum = 2; allowed is 4 in lockstep"):
        arm("decoupled:K=2", lockstep=True)


def test_the_same_arm_twice_is_refused() -> None:
    base = base_manifest(num_learners=4, tokens=1_000_000, lockstep=False)
    with pytest.raises(ConfigError, match="--arm diloco: given 2 times"):
        arms_from(["diloco", "decoupled", "diloco"], base, num_learners=4)
