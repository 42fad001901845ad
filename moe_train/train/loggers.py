"""Copies of the metrics for TensorBoard, Weights & Biases and MLflow. Each package is imported only when its logger is on."""

from __future__ import annotations

import importlib.util
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from moe_train.config import Config, ConfigError
from moe_train.config.errors import require_choice
from moe_train.config.run import LOGGERS
from moe_train.train.callbacks import Callback, Record

if TYPE_CHECKING:
    from moe_train.train.trainer import Trainer

EXTRAS = {"tensorboard": "tensorboard", "wandb": "moe-train[wandb]", "mlflow": "moe-train[mlflow]"}


def check_loggers(names: list[str]) -> None:
    """ConfigError for a logger that is unknown or whose package is missing, before anything is built."""
    for name in names:
        require_choice("log.loggers", name, LOGGERS)
        if importlib.util.find_spec(name) is None:
            raise ConfigError(f"log.loggers={name} needs the package {name}: pip install '{EXTRAS[name]}', or leave it out of log.loggers.")


def build_loggers(config: Config) -> list[Callback]:
    """One callback for each name in log.loggers."""
    known = {"tensorboard": TensorBoard, "wandb": WandB, "mlflow": MLflow}
    return [known[name]() for name in config.log.loggers]


def scalars(record: Record) -> dict[str, float]:
    """The numbers of a record; a list becomes one entry an item."""
    numbers: dict[str, float] = {}
    for key, value in record.items():
        if isinstance(value, list):
            numbers |= {f"{key}/{index}": float(item) for index, item in enumerate(value)}
        elif isinstance(value, int | float) and key != "step":
            numbers[key] = float(value)
    return numbers


class TensorBoard(Callback):
    """Event files in run.dir/tensorboard. After a resume, TensorBoard itself drops what lies behind the resumed step (purge_step)."""

    def on_start(self, trainer: Trainer) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.writer = SummaryWriter(str(trainer.run_dir / "tensorboard"), purge_step=trainer.resumed_step + 1)

    def on_step(self, record: Record) -> None:
        for key, value in scalars(record).items():
            self.writer.add_scalar(key, value, record["step"])

    def on_end(self, trainer: Trainer, status: str) -> None:
        if hasattr(self, "writer"):
            self.writer.close()


class WandB(Callback):
    """Weights & Biases, files below run.dir; WANDB_MODE=offline is respected. The run's id is kept, so that a resumed run
    continues its curve."""

    def on_start(self, trainer: Trainer) -> None:
        import wandb

        note = trainer.run_dir / "wandb_id"
        run_id = note.read_text().strip() if note.exists() else None
        self.run: Any = wandb.init(
            project=trainer.config.log.project,
            name=trainer.config.run.name,
            dir=str(trainer.run_dir),
            config=asdict(trainer.config),
            id=run_id,
            resume="allow",
        )
        note.write_text(self.run.id)

    def on_step(self, record: Record) -> None:
        self.run.log(scalars(record), step=record["step"])

    def on_end(self, trainer: Trainer, status: str) -> None:
        if hasattr(self, "run"):
            self.run.finish(exit_code=1 if status == "failed" else 0)


class MLflow(Callback):
    """MLflow; without MLFLOW_TRACKING_URI the store is run.dir/mlruns."""

    def on_start(self, trainer: Trainer) -> None:
        import os

        import mlflow

        self.mlflow: Any = mlflow
        if "MLFLOW_TRACKING_URI" not in os.environ:
            # The folder store is the one that mlflow-skinny has; MLflow 3 wants to hear that it is meant.
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
            mlflow.set_tracking_uri((trainer.run_dir.resolve() / "mlruns").as_uri())
        mlflow.set_experiment(trainer.config.log.project)
        note = trainer.run_dir / "mlflow_id"
        run = mlflow.start_run(run_id=note.read_text().strip() if note.exists() else None, run_name=trainer.config.run.name)
        note.write_text(run.info.run_id)

    def on_step(self, record: Record) -> None:
        self.mlflow.log_metrics({key.replace("/", "."): value for key, value in scalars(record).items()}, step=record["step"])

    def on_end(self, trainer: Trainer, status: str) -> None:
        if hasattr(self, "mlflow"):
            self.mlflow.end_run("FAILED" if status == "failed" else "FINISHED")
