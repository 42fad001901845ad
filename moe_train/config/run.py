"""Everything of a run that is not the model: data, optimizer, training loop, layout, logging."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Optional

from moe_train.config.balance import BalanceConfig
from moe_train.config.model import ModelConfig

PRECISIONS = ("fp32", "bf16")
RECOMPUTES = ("none", "selective", "full")
RECOMPUTE_PARTS = ("attention", "ffn", "experts", "norms")
OPTIMIZERS = ("adamw", "muon", "muonclip")
SCHEDULES = ("cosine", "wsd", "constant")
DATA_KINDS = ("python_stdlib", "indexed")
RESUMES = ("auto", "never")
LOGGERS = ("tensorboard", "wandb", "mlflow")


@dataclass
class DataConfig:
    kind: str = "python_stdlib"
    seq_len: int = 512
    """Tokens a sequence [T]."""
    split: str = "98,2,0"
    """Weights of train, validation and test, by documents' tokens."""
    vocab_size: int = 8192
    """python_stdlib only: size of the byte-level BPE trained on the corpus."""
    max_bytes: Optional[int] = None
    """python_stdlib only: use about this many bytes of the corpus (None: all, about 31 MB)."""
    cache_dir: Optional[str] = None
    """Where prepared tokens and index caches are kept, shared by runs, keyed by content (None: $MOE_TRAIN_CACHE or ~/.cache/moe_train)."""
    paths: list[str] = field(default_factory=list)
    """indexed only: prefixes of .bin/.idx pairs made by `moe-train prepare-data`."""
    weights: Optional[list[float]] = None
    """indexed only: blend weight of each path (None: by size)."""
    tokenizer: Optional[str] = None
    """indexed only: a tokenizer.json or a folder that holds one; None takes the one beside the first path."""


@dataclass
class ScheduleConfig:
    name: str = "cosine"
    warmup_steps: int = 0
    decay_steps: Optional[int] = None
    """wsd: length of the final decay (None: a tenth of train.steps); cosine: the step of the minimum (None: train.steps)."""
    min_lr_ratio: float = 0.1


@dataclass
class OptimConfig:
    name: str = "adamw"
    lr: float = 3e-4
    weight_decay: float = 0.1
    betas: list[float] = field(default_factory=lambda: [0.9, 0.95])
    eps: float = 1e-8
    adamw_lr: Optional[float] = None
    """muon, muonclip: rate for embeddings, head, norms, biases and the router (None: lr)."""
    decay_all: bool = False
    """Weight decay acts on matrices only (embeddings and router too); true: also on norms, biases and sinks (OLMoE)."""
    muon_per_head: bool = True
    """Muon orthogonalises query, key and value projections head by head (Kimi K3); false: as whole matrices."""
    muon_momentum: float = 0.95
    muon_nesterov: bool = True
    muon_steps: int = 5
    """Newton-Schulz steps."""
    muon_rms_scale: float = 0.2
    """Update = muon_rms_scale · √max(rows, cols) · NewtonSchulz(M) (Moonlight, arXiv:2502.16982)."""
    qk_clip_tau: float = 100.0
    """muonclip: heads whose largest attention logit exceeds τ are scaled by τ/max (Kimi K2, arXiv:2507.20534)."""
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)


@dataclass
class BatchRampConfig:
    """global_batch grows from `start` to train.global_batch in equal increments over `steps` optimizer steps."""

    start: Optional[int] = None
    increment: int = 1
    steps: int = 0


@dataclass
class TrainConfig:
    steps: int = 100
    global_batch: int = 16
    """Sequences an optimizer step sees over all ranks."""
    micro_batch: int = 4
    """Sequences of one forward and backward pass on one rank."""
    batch_ramp: BatchRampConfig = field(default_factory=BatchRampConfig)
    precision: str = "fp32"
    grad_clip: float = 1.0
    """Largest global gradient norm (0: no clipping)."""
    max_skipped_steps: int = 10
    """Consecutive steps with a non-finite loss or gradient that are skipped before the run fails."""
    recompute: str = "none"
    recompute_parts: list[str] = field(default_factory=lambda: ["experts"])
    """selective only."""
    compile: bool = False
    deterministic: bool = False
    device: str = "auto"
    """auto: torch.accelerator where there is one, else cpu."""
    threads: Optional[int] = None
    eval_every: int = 0
    """Steps between evaluations on the validation split (0: only at the end)."""
    eval_sequences: int = 64
    checkpoint_every: int = 0
    """Steps between checkpoints (0: only at the end)."""
    keep_checkpoints: int = 2
    async_checkpoint: bool = True


@dataclass
class ParallelConfig:
    """Degrees of parallelism; -1 for dp_shard fills what is left of the world."""

    dp_replicate: int = 1
    dp_shard: int = 1
    tp: int = 1
    pp: int = 1
    ep: int = 1
    etp: int = 1
    cp: int = 1


@dataclass
class LogConfig:
    every: int = 1
    """Steps between lines of metrics.jsonl."""
    loggers: list[str] = field(default_factory=lambda: ["tensorboard"])
    console: bool = True
    project: str = "moe_train"
    report: bool = True


@dataclass
class DemoConfig:
    """What `+experiment=demo` adds after training."""

    bigram: bool = False
    """Fit an interpolated bigram model on the same training tokens and compare bits per byte."""
    sample: Optional[str] = None
    """Print a continuation of this text."""
    sample_tokens: int = 120


@dataclass
class RunConfig:
    name: str = "default"
    dir: str = "runs/default"
    """Everything a run writes is below this folder."""
    resume: str = "auto"
    """auto: continue from the newest whole checkpoint in run.dir; never: refuse a folder that already holds a run; or the path of a
    checkpoint folder."""


@dataclass
class Config:
    seed: int = 1234
    run: RunConfig = field(default_factory=RunConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    balance: BalanceConfig = field(default_factory=BalanceConfig)
    data: DataConfig = field(default_factory=DataConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    log: LogConfig = field(default_factory=LogConfig)
    demo: DemoConfig = field(default_factory=DemoConfig)
