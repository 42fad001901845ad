"""A run's state to and from a checkpoint folder, tensor by tensor: a missing, an unknown or a misshapen tensor is an error."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from moe_train.config import Config, ConfigError
from moe_train.model.transformer import Transformer
from moe_train.optim import Optimizer
from moe_train.train.checkpoint import newest_whole, require_whole
from moe_train.train.precision import Weights, cast
from moe_train.train.run_dir import CONFIG, TOKENIZER, read_config
from moe_train.train.tensors import read_tensors

SHOWN = 8


def model_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and persistent buffers by name; a tied tensor once."""
    persistent = model.state_dict(keep_vars=True)
    buffers = {name: tensor for name, tensor in model.named_buffers() if name in persistent}
    return {name: parameter.data for name, parameter in model.named_parameters()} | buffers


def optimizer_tensors(weights: Weights, optimizer: Optimizer) -> dict[str, Tensor]:
    """Moments, and the masters of parameters that compute in a lower precision."""
    return optimizer.state() | {f"master/{name}": weights.master[name].data for name in weights.low}


def load_training_state(folder: Path, model: nn.Module, weights: Weights, optimizer: Optimizer) -> None:
    """Fill model, masters and moments, bit by bit as saved."""
    _copy(folder / "model.safetensors", model_tensors(model), "model")
    _copy(folder / "optimizer.safetensors", optimizer_tensors(weights, optimizer), "optimizer")


@torch.no_grad()
def _copy(path: Path, targets: Mapping[str, Tensor], what: str) -> None:
    try:
        found = read_tensors(path)
    except ValueError as error:
        raise ConfigError(f"{error}.") from None
    differences = [f"{name}: not in the checkpoint" for name in targets if name not in found]
    differences += [f"{name}: only in the checkpoint" for name in found if name not in targets]
    for name in targets.keys() & found.keys():
        have, want = found[name], targets[name]
        if have.shape != want.shape or have.dtype != want.dtype:
            differences.append(f"{name}: {_describe(have)} in the checkpoint, {_describe(want)} here")
    if differences:
        more = f" … and {len(differences) - SHOWN} more" if len(differences) > SHOWN else ""
        raise ConfigError(
            f"{path.parent} is of another {what}: {len(differences)} of {len(targets)} tensors differ. "
            f"{'; '.join(sorted(differences)[:SHOWN])}{more}. Use the config it was made with ({path.parent / CONFIG}), or another run.dir."
        )
    for name, target in targets.items():
        target.copy_(found[name])


def _describe(tensor: Tensor) -> str:
    return f"{list(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"


def load_model_for_inference(path: str | Path) -> tuple[Transformer, Config, Path]:
    """The model (eval mode, CPU, in the precision it was trained in), its config and its tokenizer.json, from a run folder or a
    checkpoint folder."""
    folder = Path(path).expanduser()
    if not folder.is_dir():
        raise ConfigError(f"{folder} is not a folder; give a run folder or one of its checkpoints (…/checkpoints/step_00000100).")
    if (folder / "checkpoints").is_dir():
        newest = newest_whole(folder / "checkpoints")
        if newest is None:
            raise ConfigError(f"{folder} holds no checkpoint yet.")
        folder = newest
    else:
        require_whole(folder)
    config = read_config(folder / CONFIG)
    model = Transformer(config.model, config.balance)
    cast(model, config.train.precision)
    _copy(folder / "model.safetensors", model_tensors(model), "model")
    return model.eval(), config, folder / TOKENIZER
