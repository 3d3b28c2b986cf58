"""`geo_diloco.join`: the public face of a peer, for a training script or for the command line's own learner.

The script keeps its main thread; the node runs beside it. SIGINT and SIGTERM are taken over while inside (in the main
thread only): the first one makes `Learner.step` return True, so that a script's loop ends by itself and leaving is
clean. Before there is a learner it raises SystemExit, which leaves as well.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from geo_diloco.config import PeerConfig
from geo_diloco.errors import LayoutError, ModelError, UserError
from geo_diloco.manifest import RunManifest
from geo_diloco.node.companion import Companion, learners_own
from geo_diloco.node.joining import Lobby, enter
from geo_diloco.node.machine import pick_device, pick_dtype
from geo_diloco.node.member import Begun, Member
from geo_diloco.node.rundir import RunDir, disk_failure, disk_failures, hold_slot
from geo_diloco.node.signals import StopSignals
from geo_diloco.node.thread import NodeThread
from geo_diloco.numerics.fragments import Layout, layout_from_module
from geo_diloco.observability import EventLog, stderr_log
from geo_diloco.protocol.effects import StartTraining
from geo_diloco.runtime.dht import load_library
from geo_diloco.runtime.identity import Identity
from geo_diloco.runtime.invite import Invite
from geo_diloco.training.data import TokenStream
from geo_diloco.training.learner import Learner, LearnerSetup, check_given
from geo_diloco.training.models import build_model, vocabulary_of

LEAVE_S = 30.0
"""What it does then is bounded by less; only what can't be bounded, such as a disk, takes longer."""


class Peer:
    """A peer of a run; a context manager. Made by `join`. For the thread that made it."""

    def __init__(self, invite: Invite, config: PeerConfig) -> None:
        self._invite = invite
        self._config = config
        self.device: torch.device = pick_device(config.device)
        self.dtype: torch.dtype = pick_dtype(config.dtype)
        if config.threads > 0:
            torch.set_num_threads(config.threads)
        self._stop = threading.Event()
        self._signals = StopSignals(self._on_signal)
        self._is_closed = False
        self._layout: Layout | None = None
        self._companion: Companion | None = None
        self._learner: Learner | None = None
        self._stream: TokenStream | None = None
        self._stream_of: StartTraining | None = None
        self._member: Member | None = None
        self._run_dir: RunDir = hold_slot(invite.run, config.run_dir)
        self._log = _open_log(self._run_dir, config)
        self._thread = NodeThread("geo_diloco peer")
        self._signals.take_over()
        try:
            with self._signals.raising():
                load_library()
            with disk_failures(self._run_dir.root):
                identity = Identity.load_or_create(self._run_dir.identity_key)
                self._run_dir.appear_as(identity.peer_id)
                own = learners_own(config) if config.announce else config
                lobby = self._thread.wait(enter(invite, self._run_dir, identity, own, self._log), check=self._check)
                self._member = self._thread.wait(_make(lobby, own))
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Peer:
        self._signals.raises = True
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(save=kind is None)

    # ---- facts

    @property
    def _joined(self) -> Member:
        if self._member is None or self._is_closed:
            raise UserError("this peer has left the run; join it again for another one")
        return self._member

    @property
    def manifest(self) -> RunManifest:
        return self._joined.lobby.manifest

    @property
    def run_dir(self) -> Any:
        """Where this peer keeps its files, a Path."""
        return self._run_dir.root

    @property
    def layout(self) -> Layout:
        """How the run cuts the model into fragments."""
        if self._layout is None:
            self._layout = self._layout_of(self.build_model())
        return self._layout

    @property
    def finished(self) -> bool:
        return self._joined.finished.is_set()

    def status(self) -> dict[str, Any]:
        """This peer's own view of the run."""

        async def ask() -> dict[str, Any]:
            return dict(self._joined.status())

        return self._thread.wait(ask(), timeout_s=10.0)

    # ---- training

    def build_model(self) -> nn.Module:
        """The run's model, with the right shapes; its weights come with `learner`."""
        return build_model(self.manifest.model)

    def learner(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, *, sets_learning_rate: bool = True
    ) -> Learner:
        """Join the run with this model: fetch its state, put Theta (or this peer's own checkpoint) into the model.

        Waits until this peer is admitted. Raises LayoutError if the model is not the run's, RefusedError if the run
        does not admit this peer, UserError if the optimizer is not one of this model.
        """
        member = self._joined
        if self._learner is not None:
            raise UserError("a peer has one learner, and this one's was made already; keep what peer.learner returned")
        check_given(model, optimizer)
        layout = self._checked_layout(model)
        begun = self._begin(layout)
        if self._config.announce and not self.finished:
            with disk_failures(self._run_dir.root):
                folder = self._run_dir.root / "standby"
                self._companion = Companion(self._invite, folder, self._config, self._log)
        learning = member.learning
        assert learning is not None
        if self.finished or learning.allotment is None:
            learning.mailbox.set_resume(*_counts(begun))
        else:
            learning.mailbox.set_resume(learning.allotment.resume_step, _counts(begun)[1])
        setup = LearnerSetup(
            manifest=self.manifest,
            layout=layout,
            theta=begun.theta,
            checkpoint=begun.checkpoint,
            cursor=self._cursor,
            save_every_s=self._config.save_every_s,
            sets_learning_rate=sets_learning_rate,
            pace_ms=self._config.pace_ms,
        )
        self._layout, self._learner = layout, Learner(model, optimizer, learning.mailbox, setup)
        if not self.finished:
            self._log.note("training", self._begin_text(model))
        if begun.checkpoint is None and not self.finished:
            # From here on there is always a checkpoint to come back to, so no step is ever merged without a trace.
            self._learner.save()
            self._thread.wait(learning.wait_saved(learning.mailbox.last_save), check=self._check)
        self._signals.raises = False  # from here on `Learner.step` tells
        return self._learner

    def data(self) -> Iterator[Tensor]:
        """Batches of this learner's share, endless; after `learner`. The share may change while the run goes on."""
        if self._learner is None:
            raise UserError("call peer.learner(model, optimizer) before peer.data(): a share comes with it")
        while True:
            try:
                with self._signals.raising():  # reading a share may take long
                    stream = self._current_stream()
            except SystemExit:
                return
            if stream is None:
                return
            yield stream.next_batch()

    def request_stop(self, reason: str) -> None:
        """Have `Learner.step` return True at its next call. From any thread."""
        self._stop.set()
        if self._member is not None and self._member.learning is not None:
            self._member.learning.mailbox.finish(reason)

    def _begin(self, layout: Layout) -> Begun:
        member = self._joined
        with disk_failures(self._run_dir.root):
            begun = self._thread.wait(member.follow(layout, trains=True), check=self._check)
        learning = member.learning
        assert learning is not None
        self._thread.wait(learning.started.wait(), check=self._check)
        self._check()
        return begun

    def _begin_text(self, model: nn.Module) -> str:
        """What it trains on, which a script may have chosen otherwise than the settings say."""
        device = next((parameter.device for parameter in model.parameters()), self.device)
        threads = torch.get_num_threads()
        on = f"{device} ({str(self.dtype).removeprefix('torch.')})"
        on += f", {threads} thread{'' if threads == 1 else 's'}" if device.type == "cpu" else ""
        return f"on {on}; this peer's files: {self._run_dir.root}; Ctrl-C leaves, join again to go on"

    def _layout_of(self, model: nn.Module) -> Layout:
        return layout_from_module(model, num_fragments=self.manifest.sync.num_fragments)

    def _checked_layout(self, model: nn.Module) -> Layout:
        """The given model's layout. If it can't be the run's, name the first difference."""
        try:
            layout = self._layout_of(model)
        except ModelError as exc:
            raise LayoutError(f"this model is not the run's: {exc}") from exc
        self._checked(layout)
        return layout

    def _checked(self, layout: Layout) -> None:
        difference = None if self._layout is None else layout.first_difference(self._layout)
        if difference is not None:
            raise LayoutError(f"this model is not the run's (here: this model; there: the run): {difference}")

    def _cursor(self) -> int:
        if self._stream is not None:
            return self._stream.cursor
        learner = self._learner
        return 0 if learner is None else learner.num_tokens

    def _current_stream(self) -> TokenStream | None:
        learning = self._joined.learning
        allotment = None if learning is None else learning.allotment
        if allotment is not None and allotment is not self._stream_of:
            self._stream = TokenStream(
                self.manifest.data,
                share=allotment.share,
                cursor=allotment.cursor,
                pass_number=allotment.pass_number,
                data_dir=self._config.data_dir,
                vocabulary=vocabulary_of(self.manifest.model),
            )
            self._stream_of = allotment
        return self._stream

    # ---- following without training

    def follow(self) -> None:
        """Follow the chain until the run is finished or this peer is told to stop."""
        with disk_failures(self._run_dir.root):
            self._thread.wait(self._joined.follow(self.layout, trains=False), check=self._check)
        self._thread.wait(self._joined.finished.wait(), check=self._check)

    # ---- the end

    def _check(self) -> None:
        """While waiting: leave if told to, raise what ended the peer."""
        if self._stop.is_set():
            raise SystemExit(0)
        member = self._member
        if member is not None and member.failure is not None:
            raise member.failure

    def _on_signal(self, name: str) -> None:
        self._log.note("leave", f"{name}: leaving")
        if self._companion is not None:
            self._companion.tell_to_leave()
        self.request_stop(name)

    def close(self, *, save: bool = False) -> None:
        """Leave. May be called again. `save`: the model is between two inner steps, so a last checkpoint is taken."""
        if self._is_closed:
            return
        self._is_closed = True
        self._signals.raises = False
        member, companion = self._member, self._companion
        if companion is not None:
            companion.tell_to_leave()
        try:
            if member is not None:
                last_save = self._save_last(member) if save else None
                self._thread.wait(member.leave(last_save=last_save), timeout_s=LEAVE_S, doing="leave in good order")
                if member.learning is not None:
                    member.learning.mailbox.finish("this peer has left")  # for a script that goes on stepping
        finally:
            if companion is not None:
                companion.close()
            self._thread.stop()
            self._log.close()
            self._run_dir.release()
            self._signals.give_back()

    def _save_last(self, member: Member) -> int | None:
        learner = self._learner
        if learner is None or member.learning is None or member.failure is not None:
            return None
        try:
            learner.carry_out_orders()
            learner.save()
        except Exception as exc:  # no memory for the copies, a device that is gone: leave all the same
            self._log.failure("leave", exc)
            return None
        return member.learning.mailbox.last_save


def _counts(begun: Begun) -> tuple[int, int]:
    return (0, 0) if begun.checkpoint is None else (begun.checkpoint.step, begun.checkpoint.tokens)


def _open_log(run_dir: RunDir, config: PeerConfig) -> EventLog:
    try:
        return stderr_log(run_dir.log, level=config.log_level)
    except OSError as exc:
        run_dir.release()
        raise disk_failure(run_dir.root, exc) from exc


async def _make(lobby: Lobby, config: PeerConfig) -> Member:
    return Member(lobby, config)
