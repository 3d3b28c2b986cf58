"""Learner.step: what is reported, what is carried out and when, and that nothing waits outside lockstep."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from geo_diloco.errors import DirectoryError, LayoutError, ModelError, UserError
from geo_diloco.manifest import InnerSpec
from geo_diloco.training.checkpoint import load_learner, save_learner
from geo_diloco.training.learner import (
    AdoptOrder,
    FinishOrder,
    Learner,
    LearnerSetup,
    ResetOrder,
    SampleOrder,
    check_given,
    schedule_factor,
)

from .toy import ScriptedPort, Toy, layout_of, make_manifest, make_toy, vectors_of


def make_learner(
    port: ScriptedPort, *, model: Toy | None = None, rate: float = 0.1, **setup: Any
) -> tuple[Learner, Toy, torch.optim.AdamW]:
    model = make_toy() if model is None else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    layout = layout_of(model)
    values: dict[str, Any] = {
        "manifest": make_manifest(),
        "theta": vectors_of(make_toy(50), layout),
        "save_every_s": 0.0,
    }
    return Learner(model, optimizer, port, LearnerSetup(layout=layout, **(values | setup))), model, optimizer


def train_once(model: Toy, optimizer: torch.optim.Optimizer, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    batch = torch.randint(0, 11, (2, 6), generator=generator)
    loss: Tensor = model(batch, batch).loss
    loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    optimizer.zero_grad()
    return loss


def test_a_new_learner_starts_from_theta() -> None:
    learner, model, _ = make_learner(ScriptedPort())
    theta = vectors_of(make_toy(50), learner.replica.layout)
    assert all(torch.equal(a, b) for a, b in zip(vectors_of(model, learner.replica.layout), theta, strict=True))


def test_steps_and_tokens_are_cumulative_and_go_on_from_where_the_run_says() -> None:
    port = ScriptedPort(resume=(40, 4000))
    learner, _, _ = make_learner(port)
    assert learner.step(tokens=10, loss=2.5) is False
    assert learner.step(tokens=7, loss=torch.tensor(1.5)) is False
    assert port.steps == [(41, 4010, 2.5, 10), (42, 4017, 1.5, 17)]


def test_the_cursor_is_the_streams_where_there_is_one() -> None:
    port = ScriptedPort()
    learner, _, _ = make_learner(port, cursor=lambda: 512)
    learner.step(tokens=10)
    assert port.steps == [(1, 10, None, 512)]


def test_a_loss_that_is_not_finite_is_reported_as_none() -> None:
    port = ScriptedPort()
    learner, _, _ = make_learner(port)
    learner.step(tokens=1, loss=math.nan)
    learner.step(tokens=1, loss=torch.tensor(math.inf))
    assert [loss for _, _, loss, _ in port.steps] == [None, None]


def test_an_inner_step_without_tokens_is_the_scripts_mistake() -> None:
    learner, _, _ = make_learner(ScriptedPort())
    with pytest.raises(UserError, match="tokens=0"):
        learner.step(tokens=0)


@pytest.mark.parametrize("tokens", [-1, 2.5, None, "12"])
def test_tokens_are_a_whole_number_and_a_step_that_is_refused_counts_nowhere(tokens: Any) -> None:
    port = ScriptedPort()
    learner, _, _ = make_learner(port)
    with pytest.raises(UserError, match=r"pass batch\.numel\(\)"):
        learner.step(tokens=tokens)
    assert (learner.num_steps, learner.num_tokens, port.steps) == (0, 0, [])
    assert learner.step(tokens=torch.tensor(3)) is False  # type: ignore[arg-type]
    assert port.steps == [(1, 3, None, 3)]


@pytest.mark.parametrize("loss", [torch.ones(3), "low", object()])
def test_a_loss_that_is_no_number_is_the_scripts_mistake(loss: Any) -> None:
    port = ScriptedPort()
    learner, _, _ = make_learner(port)
    with pytest.raises(UserError, match=r"step\(loss=\.\.\.\) takes one number"):
        learner.step(tokens=1, loss=loss)
    assert port.steps == []


def test_a_learner_is_made_of_a_model_and_the_optimizer_that_trains_it() -> None:
    model, other = make_toy(), make_toy()
    check_given(model, torch.optim.SGD(model.parameters(), lr=1.0))
    with pytest.raises(UserError, match=r"the model is a dict, not a torch\.nn\.Module"):
        check_given({}, torch.optim.SGD(model.parameters(), lr=1.0))
    with pytest.raises(UserError, match="the optimizer is a NoneType"):
        check_given(model, None)
    with pytest.raises(UserError, match="trains none of this model's parameters"):
        check_given(model, torch.optim.SGD(other.parameters(), lr=1.0))


def test_orders_are_carried_out_in_the_order_in_which_they_came() -> None:
    port = ScriptedPort()
    learner, model, optimizer = make_learner(port)
    train_once(model, optimizer, 1)
    theta = learner.replica.anchor(0) + 1.0
    port.orders.extend(
        [
            SampleOrder(fragment=0, round=1),
            AdoptOrder(fragment=0, version=1, theta=theta, d_hat=None, rbar=1e9),
            SampleOrder(fragment=0, round=2),
        ]
    )
    learner.step(tokens=12)
    (_, first, step, tokens), (_, second, _, _) = port.samples
    assert (step, tokens) == (1, 12)
    torch.testing.assert_close(first, second, atol=1e-6, rtol=0)  # the carry is what was there before
    assert [(scale, at) for _, scale, at in port.adoptions] == [(1_000_000, 1)]
    assert learner.replica.anchor(0) is theta


def test_a_reset_drops_what_the_replica_carries() -> None:
    port = ScriptedPort()
    learner, model, optimizer = make_learner(port)
    train_once(model, optimizer, 1)
    theta = torch.zeros_like(learner.replica.anchor(1))
    port.orders.append(ResetOrder(fragment=1, version=3, theta=theta))
    learner.step(tokens=12)
    assert not vectors_of(model, learner.replica.layout)[1].any()
    assert [scale for _, scale, _ in port.adoptions] == [0]


def test_the_manifests_kappa_rules_adoption() -> None:
    port = ScriptedPort()
    learner, model, optimizer = make_learner(port, manifest=make_manifest(sync={"kappa": 0.0}))
    train_once(model, optimizer, 1)
    theta = learner.replica.anchor(0) + 1.0
    port.orders.append(AdoptOrder(fragment=0, version=1, theta=theta, d_hat=None, rbar=1e9))
    learner.step(tokens=12)
    assert torch.equal(vectors_of(model, learner.replica.layout)[0], theta)


def test_the_manifests_cap_rules_how_much_is_carried() -> None:
    port = ScriptedPort()
    learner, model, optimizer = make_learner(port, manifest=make_manifest(sync={"carry_cap": 0.5}))
    train_once(model, optimizer, 1)
    carry = vectors_of(model, learner.replica.layout)[0] - learner.replica.anchor(0)
    norm = float(carry.norm())
    port.orders.append(AdoptOrder(fragment=0, version=1, theta=learner.replica.anchor(0), d_hat=None, rbar=norm))
    learner.step(tokens=12)
    assert [scale for _, scale, _ in port.adoptions] == [pytest.approx(500_000, abs=2)]


def test_finish_ends_training_once_and_for_all() -> None:
    port = ScriptedPort()
    learner, _, _ = make_learner(port)
    port.orders.append(FinishOrder("token budget reached"))
    assert learner.step(tokens=1) is True
    assert learner.step(tokens=1) is True
    assert learner.finish_reason == "token budget reached" and len(port.steps) == 1


def test_a_failure_behind_the_port_is_raised_in_the_script() -> None:
    port = ScriptedPort()
    learner, _, _ = make_learner(port)
    port.failed = DirectoryError("gone")
    with pytest.raises(DirectoryError, match="gone"):
        learner.step(tokens=1)


def test_outside_lockstep_no_step_waits() -> None:
    port = ScriptedPort()
    learner, _, _ = make_learner(port)
    for _ in range(12):
        assert learner.step(tokens=1) is False
    assert port.num_waits == 0 and learner.seconds_waited == 0.0


def test_in_lockstep_each_duty_waits_for_its_own_order() -> None:
    port = ScriptedPort()  # H = 4, P = 2, tau = 1: fragment 1 sampled after step 2, fragment 0 after step 4
    learner, _, _ = make_learner(port, manifest=make_manifest(sync={"lockstep": True}))
    theta = [learner.replica.anchor(p).clone() for p in (0, 1)]
    port.orders.extend(
        [
            SampleOrder(fragment=0, round=2),  # too early: stays where it is
            AdoptOrder(fragment=1, version=1, theta=theta[1], d_hat=None, rbar=1.0),
            SampleOrder(fragment=1, round=1),
        ]
    )
    done = []
    for _ in range(4):
        learner.step(tokens=1)
        done.append((len(port.samples), len(port.adoptions)))
    assert done == [(0, 0), (1, 0), (1, 1), (2, 1)]
    assert [fragment for fragment, *_ in port.samples] == [1, 0]


def test_in_lockstep_a_finished_run_ends_the_wait() -> None:
    port = ScriptedPort()
    learner, _, _ = make_learner(port, manifest=make_manifest(sync={"lockstep": True}))
    assert [learner.step(tokens=1) for _ in range(2)] == [False, True]


def test_in_lockstep_a_reset_is_taken_and_the_duty_still_done() -> None:
    port = ScriptedPort()
    learner, _, _ = make_learner(port, manifest=make_manifest(sync={"lockstep": True}))
    zeros = torch.zeros_like(learner.replica.anchor(0))
    port.orders.extend([ResetOrder(fragment=0, version=5, theta=zeros), SampleOrder(fragment=1, round=1)])
    assert [learner.step(tokens=1) for _ in range(2)] == [False, False]
    assert learner.replica.anchor(0) is zeros and len(port.samples) == 1


@pytest.mark.parametrize(
    ("schedule", "progress", "factor"),
    [
        ("constant", 0.7, 1.0),
        ("cosine", 0.0, 1.0),
        ("cosine", 0.5, 0.55),
        ("cosine", 1.0, 0.1),
        ("linear", 0.5, 0.55),
        ("linear", 0.25, 0.775),
        ("linear", 3.0, 0.1),
        ("cosine", -1.0, 1.0),
    ],
)
def test_the_schedule_goes_from_one_to_the_final_share(schedule: Any, progress: float, factor: float) -> None:
    assert schedule_factor(progress, InnerSpec(schedule=schedule, final_share=0.1)) == pytest.approx(factor)


def test_the_learning_rate_follows_the_runs_progress_in_every_group() -> None:
    port = ScriptedPort()
    model = make_toy()
    groups = [{"params": [model.embedding.weight], "lr": 0.2}, {"params": list(model.linear.parameters()), "lr": 0.1}]
    optimizer = torch.optim.SGD(groups)
    layout = layout_of(model)
    manifest = make_manifest(inner={"schedule": "linear", "final_share": 0.0})
    learner = Learner(
        model, optimizer, port, LearnerSetup(manifest=manifest, layout=layout, theta=vectors_of(model, layout))
    )
    port.progress = 0.75
    learner.step(tokens=1)
    assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([0.05, 0.025])


def test_by_own_tokens_the_learning_rate_ignores_the_runs_progress() -> None:
    port = ScriptedPort()
    manifest = make_manifest(
        inner={"schedule": "linear", "final_share": 0.0, "schedule_by": "own"}, stop={"tokens": 100}
    )
    learner, _, optimizer = make_learner(port, manifest=manifest)
    port.progress = 0.9
    learner.step(tokens=25)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.075)


def test_a_script_may_keep_its_own_schedule() -> None:
    port = ScriptedPort()
    learner, _, optimizer = make_learner(
        port, sets_learning_rate=False, manifest=make_manifest(inner={"warmup_steps": 9})
    )
    learner.step(tokens=1)
    assert optimizer.param_groups[0]["lr"] == 0.1


def test_warm_up_is_counted_in_the_learners_own_steps_from_its_cold_start() -> None:
    port = ScriptedPort(resume=(500, 5000))  # no checkpoint: the optimizer is new, whatever the step number
    learner, _, optimizer = make_learner(port, manifest=make_manifest(inner={"warmup_steps": 3}))
    rates = [optimizer.param_groups[0]["lr"]]
    for _ in range(4):
        learner.step(tokens=1)
        rates.append(optimizer.param_groups[0]["lr"])
    assert rates == pytest.approx([0.025, 0.05, 0.075, 0.1, 0.1])


def test_another_model_than_the_runs_is_refused() -> None:
    with pytest.raises(LayoutError, match="not the run's"):
        model = Toy(width=5)
        layout = layout_of(make_toy())
        setup = LearnerSetup(manifest=make_manifest(), layout=layout, theta=vectors_of(make_toy(), layout))
        Learner(model, torch.optim.SGD(model.parameters()), ScriptedPort(), setup)


def test_a_save_is_a_copy_that_later_steps_do_not_touch() -> None:
    port = ScriptedPort()
    learner, model, optimizer = make_learner(port)
    train_once(model, optimizer, 1)
    learner.step(tokens=12)
    learner.save()
    _, tensors, extra = port.saves[0]
    before = {name: tensor.clone() for name, tensor in tensors.items()}
    train_once(model, optimizer, 2)
    assert all(torch.equal(tensor, tensors[name]) for name, tensor in before.items())
    assert (extra["save"], extra["step"], extra["tokens"]) == (1, 1, 12)


def test_a_learner_resumed_from_its_checkpoint_repeats_the_very_same_steps(tmp_path: Path) -> None:
    port = ScriptedPort()
    learner, model, optimizer = make_learner(port)
    for seed in (1, 2):
        train_once(model, optimizer, seed)
        learner.step(tokens=12)
    learner.replica.undecided_scale[1] = 0.25
    learner.save()
    save_learner(tmp_path, *port.saves[0][1:], accounts_json="{}")
    train_once(model, optimizer, 3)
    random_after = torch.rand(2)

    again = make_toy(33)
    checkpoint = load_learner(tmp_path)
    assert checkpoint is not None
    torch.manual_seed(99)
    resumed, _, optimizer_again = make_learner(
        ScriptedPort(resume=(checkpoint.step, checkpoint.tokens)), model=again, checkpoint=checkpoint
    )
    train_once(again, optimizer_again, 3)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, again.state_dict()[name]), name
    assert torch.equal(random_after, torch.rand(2))
    assert resumed.replica.undecided_scale == [1.0, 0.25]
    assert torch.equal(resumed.replica.anchor(1), learner.replica.anchor(1))
    assert (resumed.num_steps, resumed.num_tokens) == (2, 24)
    resumed.save()
    assert resumed._num_saves == 2


def test_resuming_keeps_following_the_schedule_and_does_not_warm_up_again(tmp_path: Path) -> None:
    manifest = make_manifest(inner={"warmup_steps": 2, "schedule": "linear", "final_share": 0.0})
    port = ScriptedPort()
    learner, model, optimizer = make_learner(port, manifest=manifest)
    for seed in range(3):
        train_once(model, optimizer, seed)
        learner.step(tokens=1)
    learner.save()
    save_learner(tmp_path, *port.saves[0][1:], accounts_json="{}")
    resumed_port = ScriptedPort(resume=(3, 3))
    resumed_port.progress = 0.5
    resumed, _, optimizer = make_learner(resumed_port, manifest=manifest, checkpoint=load_learner(tmp_path))
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.05)
    resumed_port.progress = 0.75
    resumed.step(tokens=1)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.025)


def test_a_checkpoint_of_another_model_is_refused(tmp_path: Path) -> None:
    port = ScriptedPort()
    learner, _, _ = make_learner(port)
    learner.save()
    save_learner(tmp_path, *port.saves[0][1:], accounts_json="{}")
    model = Toy(width=5)
    layout = layout_of(model)
    setup = LearnerSetup(
        manifest=make_manifest(), layout=layout, theta=vectors_of(model, layout), checkpoint=load_learner(tmp_path)
    )
    with pytest.raises(ModelError, match="another model"):
        Learner(model, torch.optim.AdamW(model.parameters()), ScriptedPort(), setup)


def test_a_save_is_due_every_so_many_seconds() -> None:
    now = [100.0]
    port = ScriptedPort()
    learner, _, _ = make_learner(port, save_every_s=10.0, clock=lambda: now[0])
    for _ in range(25):
        now[0] += 1.0
        learner.step(tokens=1)
    assert [extra["step"] for _, _, extra in port.saves] == [10, 20]


@pytest.mark.parametrize(("cost_s", "saved"), [(0.04, [10, 20, 30]), (0.08, [10, 26]), (60.0, [10])])
def test_copies_for_checkpoints_take_half_a_hundredth_of_the_time(cost_s: float, saved: list[int]) -> None:
    now = [100.0]

    class Slow(ScriptedPort):
        def save(self, *saved: Any) -> None:
            super().save(*saved)
            now[0] += cost_s

    port = Slow()
    learner, _, _ = make_learner(port, save_every_s=10.0, clock=lambda: now[0])
    for _ in range(30):
        now[0] += 1.0
        learner.step(tokens=1)
    assert [extra["step"] for _, _, extra in port.saves] == saved


def test_what_was_ordered_is_done_before_a_last_save_without_another_step() -> None:
    """A learner that comes back to a finished run takes no step any more, and still has versions to adopt."""
    port = ScriptedPort()
    learner, model, _ = make_learner(port)
    theta = torch.ones_like(learner.replica.anchor(1))
    port.orders.extend([ResetOrder(fragment=1, version=3, theta=theta), FinishOrder("the run is done")])
    learner.carry_out_orders()
    assert torch.equal(vectors_of(model, learner.replica.layout)[1], theta)
    assert (learner.num_steps, learner.finished) == (0, True)


def test_a_step_that_was_quicker_than_the_pace_goes_on_for_the_rest_of_it() -> None:
    now = [100.0]
    port = ScriptedPort()
    learner, _, _ = make_learner(port, clock=lambda: now[0], pace_ms=500)
    now[0] += 0.125
    learner.step(tokens=1)
    assert port.paced == [0.375]
    now[0] += 0.75
    learner.step(tokens=1)
    assert port.paced == [0.375], "it took longer by itself"


def test_pacing_is_compute_and_no_time_inside_step() -> None:
    now = [100.0]
    port = ScriptedPort()
    told: list[int] = []

    def waits(limit_s: float) -> None:
        now[0] += limit_s

    port.wait_over = waits  # type: ignore[method-assign]
    port.step_done = lambda step, tokens, step_time_us, loss, cursor: told.append(step_time_us)  # type: ignore[method-assign]
    learner, _, _ = make_learner(port, clock=lambda: now[0], pace_ms=500)
    for _ in range(3):
        now[0] += 0.125
        learner.step(tokens=1)
    assert told == [500_000] * 3
    assert learner.seconds_inside == 0.0


def test_without_a_pace_nobody_waits() -> None:
    port = ScriptedPort()
    learner, _, _ = make_learner(port, clock=lambda: 100.0)
    learner.step(tokens=1)
    assert port.paced == []
