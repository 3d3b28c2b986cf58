"""What every peer of a run must agree on.

A `RunManifest` is the run's constitution: its canonical JSON bytes, which contain the founder's key and a nonce
written once, hash to the run id. Two peers with the same run id therefore have the same rules, byte for byte; a
peer with another manifest is not in the run. Nothing local may override it (this machine's business is
`config.PeerConfig`). Reading TOML and checking ranges is `config.py`'s work; here are the facts themselves, the
standard library only, so that the core can depend on them.

Units: steps are inner steps, tokens are counted by the learner, shares of one are floats in [0, 1].
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NewType

PeerId = NewType("PeerId", str)
"""Ed25519 public key, 64 lower-case hex characters. Merges happen in sorted order of it."""
RunId = NewType("RunId", str)
"""First 20 bytes of SHA-256 over the manifest's canonical bytes, 40 hex characters."""
BranchId = NewType("BranchId", str)
"""Digest of the `found` (later: `reform`) entry that began this lineage; empty only inside that entry."""
BootId = NewType("BootId", str)
"""Random per process start, 16 hex characters."""
Digest = NewType("Digest", str)
"""BLAKE3, 64 hex characters."""
FragmentId = NewType("FragmentId", int)
Version = NewType("Version", int)
"""Outer steps applied to a fragment; 0 is Theta_0."""
Term = NewType("Term", int)
Seq = NewType("Seq", int)
MonoMs = NewType("MonoMs", int)
"""Milliseconds of this process's monotonic clock. Never compared between peers."""

WIRE_VERSION = 5
"""Version of messages, entries, frames and blob digests. Peers with another one are refused."""

MergeRule = Literal["rda", "rda-fragment", "mean"]
EmbeddingRule = Literal["mean", "rda"]
LateForm = Literal["base-relative", "paper"]
CodecName = Literal["none", "bf16", "int8", "int4"]
CODEC_CHOICES_MAX = 8
ScheduleName = Literal["constant", "cosine", "linear"]


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """Which model is trained. Exactly one of `config`, `factory`, `pretrained` is set."""

    config: Mapping[str, Any] | None = None
    """Hugging Face config as a dict with `model_type`; built by `AutoModelForCausalLM.from_config`."""
    factory: str | None = None
    """`module:function`, called with `factory_arguments`; returns a `torch.nn.Module`."""
    factory_arguments: Mapping[str, Any] = field(default_factory=dict)
    pretrained: str | None = None
    """A `save_pretrained` folder on the founder's machine: Theta_0. `start` keeps its config here for the others."""
    seed: int = 0
    """Seed of Theta_0."""


@dataclass(frozen=True, kw_only=True)
class DataSpec:
    """Where tokens come from and how they are shared out."""

    source: str = "stdlib"
    """`stdlib` (Python's own source text), or a folder or glob of .txt, .py, .md, .jsonl, .parquet files."""
    text_field: str = "text"
    """Column or key that holds the text, for jsonl and parquet."""
    tokenizer: str = "bytes"
    """`bytes` (256 tokens), or a folder with a Hugging Face tokenizer."""
    sequence_length: int = 128
    batch_size: int = 8
    num_shares: int = 8
    """Disjoint training shares; a learner is allotted one at a time."""
    heldout_share: float = 0.05
    """Share of documents (by hash of the name) that nobody trains on."""
    seed: int = 0


@dataclass(frozen=True, kw_only=True)
class InnerSpec:
    """The learners' optimizer: AdamW."""

    learning_rate: float = 3e-3
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.1
    gradient_clip: float = 1.0
    """Global gradient norm; 0 means no clipping."""
    schedule: ScheduleName = "cosine"
    schedule_by: Literal["run", "own"] = "run"
    """`run`: the run's progress; `own`: the learner's own tokens over the token budget (numerics.md, 5)."""
    warmup_steps: int = 20
    """A learner's own short warm-up after a cold start."""
    final_share: float = 0.1
    """Learning rate at the end of the run, as a share of the first."""


@dataclass(frozen=True, kw_only=True)
class SyncSpec:
    """How often, and on what terms, fragments are synchronised."""

    interval_steps: int = 24
    """H: a fragment is merged at most once every H inner steps of the median live learner."""
    num_fragments: int = 24
    """P."""
    overlap_steps: int = 2
    """tau: inner steps that transfers may overlap."""
    quorum: int = 1
    """K: fresh contributions without which a round does not close."""
    grace: bool = True
    """Wait for more than the quorum where that costs no one a step."""
    grace_gamma: float = 0.5
    """Share of the slack that grace may use."""
    staleness_max: int = 8
    """S_max: versions a late contribution's base may lie behind."""
    kappa: float = 1.0
    """Share of a learner's unmerged work kept at adoption; 0 is the paper's overwrite."""
    carry_cap: float = 2.0
    """What is kept is at most that many times as long as the merged deltas are on average."""
    late_form: LateForm = "base-relative"
    merge: MergeRule = "rda"
    """`rda` takes direction and length of each tensor, `rda-fragment` of the whole fragment."""
    merge_embeddings: EmbeddingRule = "mean"
    """Of embeddings, where the others aren't merged by plain mean."""
    token_weights: bool = True
    """Who trained on more tokens, and in larger steps, weighs more in a merge; else all weigh the same."""
    weigh_absent: bool = True
    """A merge moves Theta by its portion: the weight of those in it beside that of all learners. Else those in it count
    as everybody, and weigh by what they trained since they adopted last."""
    rounds_in_flight_max: int = 8
    lockstep: bool = False
    """Deterministic order for tests and research; the only mode in which `step` may wait."""


@dataclass(frozen=True, kw_only=True)
class OuterSpec:
    """Nesterov SGD on the merged outer gradient."""

    eta: float = 0.7
    mu: float = 0.5
    gain_max: float = 0.0
    """Momentum is lowered where it would add steps up to more than that many, 1 / (1 - mu * rho); 0: never."""


@dataclass(frozen=True, kw_only=True)
class CodecSpec:
    """How one leg is encoded; zstd level 1 is always last."""

    name: CodecName = "int4"
    block: int = 64
    """Elements that share a scale (int8, int4)."""


@dataclass(frozen=True, kw_only=True)
class StopSpec:
    """When the run is finished: whichever of the set limits comes first; 0 means not set."""

    tokens: int = 0
    minutes: float = 0.0
    commits: int = 0


@dataclass(frozen=True, kw_only=True)
class EvalSpec:
    """Held-out loss of Theta, measured by the syncer's evaluator and recorded in the chain."""

    every_seconds: float = 10.0
    """0 measures only at the beginning and at the end."""
    sequences: int = 64


@dataclass(frozen=True, kw_only=True)
class ElectionSpec:
    """Who may become syncer, and how soon (protocol/README.md, election)."""

    lease_seconds: float = 15.0
    """L: without a majority of the electors for that long a syncer commits nothing. Failover takes a little longer."""
    electors: int = 5
    """How many electors the syncer tries to have: 1, 3, 5 or 7. 1: only the founder ever serves."""
    one_machine: bool = False
    """Electors may share a host. For runs on one machine, where they guard against the end of a process only."""


@dataclass(frozen=True, kw_only=True)
class RunManifest:
    """Everything the peers of one run share. `canonical_bytes` is what is hashed and sent."""

    name: str = "run"
    model: ModelSpec = field(default_factory=ModelSpec)
    data: DataSpec = field(default_factory=DataSpec)
    inner: InnerSpec = field(default_factory=InnerSpec)
    sync: SyncSpec = field(default_factory=SyncSpec)
    outer: OuterSpec = field(default_factory=OuterSpec)
    codec_up: CodecSpec = field(default_factory=CodecSpec)
    """Learner to syncer."""
    codec_up_choices: tuple[CodecSpec, ...] = ()
    """Besides `codec_up`: each learner takes the least lossy of them all that its link keeps up with."""
    codec_down: CodecSpec = field(default_factory=CodecSpec)
    """Syncer to everyone: all must hold the same state, so it is the same for all."""
    stop: StopSpec = field(default_factory=StopSpec)
    evaluation: EvalSpec = field(default_factory=EvalSpec)
    election: ElectionSpec = field(default_factory=ElectionSpec)
    admission: Literal["open", "token"] = "open"
    """`token`: only peers whose invite carries the run's admission token are admitted."""
    founder: PeerId = PeerId("")
    nonce: str = ""
    """Written once by the founder, 32 hex characters."""
    wire_version: int = WIRE_VERSION

    def canonical_bytes(self) -> bytes:
        """UTF-8 JSON with sorted keys and no spaces: the only form that is hashed or sent."""
        return json.dumps(dataclasses.asdict(self), sort_keys=True, separators=(",", ":"), ensure_ascii=True).encode()

    def run_id(self) -> RunId:
        return run_id_from_bytes(self.canonical_bytes())

    def rules(self) -> RunRules:
        """The part that the core decides by."""
        return RunRules(
            sync=self.sync,
            outer=self.outer,
            stop=self.stop,
            evaluation=self.evaluation,
            num_shares=self.data.num_shares,
            tokens_per_step=self.data.sequence_length * self.data.batch_size,
            founder=self.founder,
            election=self.election,
            codec_up=self.codec_up,
            codec_up_choices=self.codec_up_choices,
            codec_down=self.codec_down,
        )


@dataclass(frozen=True, kw_only=True)
class RunRules:
    """What the protocol core needs of the manifest, and nothing about models or data."""

    sync: SyncSpec = field(default_factory=SyncSpec)
    outer: OuterSpec = field(default_factory=OuterSpec)
    stop: StopSpec = field(default_factory=StopSpec)
    evaluation: EvalSpec = field(default_factory=EvalSpec)
    num_shares: int = 8
    tokens_per_step: int = 0
    """Of the manifest's own batches; 0 if not known: then claimed tokens have no limit."""
    founder: PeerId = PeerId("")
    """Founds the run; the only one who can amend and reform it."""
    election: ElectionSpec = field(default_factory=ElectionSpec)
    codec_up: CodecSpec = field(default_factory=CodecSpec)
    codec_up_choices: tuple[CodecSpec, ...] = ()
    codec_down: CodecSpec = field(default_factory=CodecSpec)


_NAMES_CODE = frozenset({"auto_map", "trust_remote_code", "attn_implementation", "experts_implementation"})


def names_code(key: str) -> bool:
    """Whether a key of a Hugging Face config can name code or a hub: such code is never run or fetched."""
    return key in _NAMES_CODE or key.startswith("_")


def keys_naming_code(config: Mapping[str, Any]) -> Iterator[str]:
    """Dotted keys of that kind, nested ones included."""
    for key, value in config.items():
        if names_code(key):
            yield key
        elif isinstance(value, Mapping):
            yield from (f"{key}.{inner}" for inner in keys_naming_code(value))


def run_id_from_bytes(canonical: bytes) -> RunId:
    return RunId(hashlib.sha256(canonical).hexdigest()[:40])
