"""Typed configuration: dataclasses without torch; `compose` turns Hydra groups into them; `validate` checks the whole before anything
starts."""

from moe_train.config.balance import BalanceConfig
from moe_train.config.errors import ConfigError, RunError
from moe_train.config.model import AttentionConfig, InitConfig, ModelConfig, MoEConfig, MTPConfig, RopeConfig, RouterConfig
from moe_train.config.run import (
    BatchRampConfig,
    Config,
    DataConfig,
    DemoConfig,
    LogConfig,
    OptimConfig,
    ParallelConfig,
    RunConfig,
    ScheduleConfig,
    TrainConfig,
)

__all__ = [
    "AttentionConfig",
    "BalanceConfig",
    "BatchRampConfig",
    "Config",
    "ConfigError",
    "DataConfig",
    "DemoConfig",
    "InitConfig",
    "LogConfig",
    "MTPConfig",
    "MoEConfig",
    "ModelConfig",
    "OptimConfig",
    "ParallelConfig",
    "RopeConfig",
    "RouterConfig",
    "RunConfig",
    "RunError",
    "ScheduleConfig",
    "TrainConfig",
]
