"""`moe-train pretrain`: everything that can be refused is refused before a weight is made, then the Trainer runs."""

from __future__ import annotations

import sys

from moe_train.config import Config, ConfigError, RunError
from moe_train.data import SampleStream, build_data
from moe_train.data.split import parse_split
from moe_train.model.flops import flops_per_token
from moe_train.model.transformer import Transformer
from moe_train.optim import build_optimizer, check_qk_clip
from moe_train.recipes.demo import after_training
from moe_train.train.alarm import LoadAlarm
from moe_train.train.callbacks import Callback
from moe_train.train.checkpoint import read_state
from moe_train.train.console import Console, Utilisation
from moe_train.train.device import compile_blocks, set_up
from moe_train.train.loggers import build_loggers, check_loggers
from moe_train.train.metrics import MetricsWriter
from moe_train.train.precision import Weights
from moe_train.train.report import Report
from moe_train.train.restore import load_training_state
from moe_train.train.run_dir import CONFIG, TOKENIZER, RunDir, check_resumable, read_config
from moe_train.train.schedule import BatchSchedule
from moe_train.train.trainer import Progress, Trainer


def run(config: Config) -> int:
    """Train; returns the exit code."""
    try:
        trainer, run_dir = build_trainer(config)
        try:
            code = trainer.run()
            if trainer.step >= config.train.steps:
                after_training(trainer)
            return code
        finally:
            run_dir.close()
    except OSError as error:
        # A full or failing disk under metrics, config or data; checkpoints have their own message.
        what = f"{error.filename or config.run.dir}: {error.strerror or error}"
        raise RunError(f"{what}. The checkpoints in {config.run.dir} are untouched; the same command continues from the newest.") from error


def build_trainer(config: Config, callbacks: list[Callback] | None = None) -> tuple[Trainer, RunDir]:
    """A Trainer ready to run, resumed when run.dir holds a checkpoint. ConfigError for everything a user can fix."""
    check_loggers(config.log.loggers)
    device = set_up(config.train)
    BatchSchedule(config.train)
    if config.optim.name == "muonclip":
        check_qk_clip(config.model, config.optim.qk_clip_tau)
    run_dir = RunDir(config)
    folder = run_dir.find_checkpoint(config.run.resume)
    if folder is not None:
        check_resumable(read_config(folder / CONFIG), config, folder)
    train_stream, valid_stream = build_data(config, "train"), _valid_stream(config)
    state = read_state(folder) if folder is not None else {}
    if state:
        train_stream.check_state(state["data"])

    model = Transformer(config.model, config.balance, recompute_parts(config))
    model.init_weights(config.seed)
    model.to(device)
    weights = Weights(model, config.train.precision)
    optimizer = build_optimizer(model, weights.master, config.optim, weights.dtype)
    progress = Progress()
    if folder is not None:
        load_training_state(folder, model, weights, optimizer)
        optimizer.updates = state["optimizer_updates"]
        progress = Progress(**{name: state[name] for name in Progress.__dataclass_fields__})
        print(f"resuming from {folder}", file=sys.stderr)
    run_dir.write_config(config)
    train_stream.tokenizer.save(str(run_dir.path / TOKENIZER))
    if config.train.compile:
        compile_blocks(model)
    flops = flops_per_token(config.model, config.data.seq_len)
    watchers = default_callbacks(config) if callbacks is None else callbacks
    trainer = Trainer(config, run_dir, model, weights, optimizer, train_stream, valid_stream, device, progress, flops, watchers)
    return trainer, run_dir


def recompute_parts(config: Config) -> tuple[str, ...]:
    """train.recompute as the model's argument."""
    if config.train.recompute == "full":
        return ("block",)
    return tuple(config.train.recompute_parts) if config.train.recompute == "selective" else ()


def _valid_stream(config: Config) -> SampleStream | None:
    """None when data.split leaves nothing for validation (an evaluation asked for is then an error)."""
    if parse_split(config.data.split)[1] > 0:
        return build_data(config, "valid")
    if config.train.eval_every > 0:
        raise ConfigError(
            f"train.eval_every={config.train.eval_every} needs a validation split, but data.split={config.data.split} has none."
        )
    return None


def default_callbacks(config: Config) -> list[Callback]:
    """Who watches an ordinary run."""
    watchers: list[Callback] = [Utilisation(), MetricsWriter(config.log.every), LoadAlarm(config.balance.alarm_max_vio)]
    watchers += [Console()] if config.log.console else []
    watchers += build_loggers(config)
    return watchers + ([Report()] if config.log.report else [])
