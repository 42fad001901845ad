"""The loop on the embedded data: resuming, evaluation, signals, the limit of skipped steps, and what is refused before a weight is made."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest
import torch

from moe_train.config import (
    AttentionConfig,
    BalanceConfig,
    Config,
    ConfigError,
    DataConfig,
    ModelConfig,
    MoEConfig,
    MTPConfig,
    OptimConfig,
    RouterConfig,
    RunConfig,
    RunError,
    TrainConfig,
)
from moe_train.recipes import pretrain
from moe_train.train.callbacks import Callback, Record
from moe_train.train.checkpoint import newest_whole, read_state
from moe_train.train.restore import load_model_for_inference
from moe_train.train.tensors import file_sum, read_tensors
from moe_train.train.trainer import Trainer


class Log(Callback):
    def __init__(self) -> None:
        self.records: list[Record] = []
        self.saved: list[str] = []
        self.events: list[str] = []

    def on_start(self, trainer: Trainer) -> None:
        self.events.append("start")

    def on_step(self, record: Record) -> None:
        self.records.append(record)

    def on_evaluate(self, record: Record) -> None:
        self.events.append(f"evaluate {record['step']}")

    def on_checkpoint(self, path: Path) -> None:
        self.saved.append(path.name)

    def on_end(self, trainer: Trainer, status: str) -> None:
        self.events.append(status)

    def numbers(self) -> list[tuple[float, ...]]:
        return [tuple(r[key] for key in ("step", "loss", "grad_norm", "lr", "tokens", "mtp_loss")) for r in self.records]


def make_config(path: Path, steps: int = 6, **train: object) -> Config:
    attention = AttentionConfig(
        kind="mla", num_heads=2, q_lora_rank=16, kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=8
    )
    moe = MoEConfig(4, 2, 16, 1, router=RouterConfig(score="sigmoid"))
    model = ModelConfig(
        vocab_size=300,
        hidden_size=32,
        num_layers=2,
        ffn_hidden_size=48,
        first_dense_layers=1,
        attention=attention,
        moe=moe,
        mtp=MTPConfig(1),
    )
    settings = {"steps": steps, "global_batch": 4, "micro_batch": 2, "eval_sequences": 4, "checkpoint_every": 2, **train}
    return Config(
        model=model,
        data=DataConfig(seq_len=32, vocab_size=300, max_bytes=200_000, split="90,10,0"),
        run=RunConfig(dir=str(path)),
        balance=BalanceConfig(bias="sign", bias_rate=0.01),
        optim=OptimConfig(lr=0.01),
        train=TrainConfig(**settings),  # type: ignore[arg-type]
    )


def run(config: Config, *more: Callback) -> tuple[int, Log]:
    log = Log()
    trainer, run_dir = pretrain.build_trainer(config, [log, *more])
    try:
        return trainer.run(), log
    finally:
        run_dir.close()


class StopAfter(Callback):
    def __init__(self, step: int, number: signal.Signals) -> None:
        self.step, self.number = step, number

    def on_step(self, record: Record) -> None:
        if record["step"] == self.step:
            signal.raise_signal(self.number)


def final_sums(path: Path) -> dict[str, str]:
    folder = newest_whole(path / "checkpoints")
    assert folder is not None
    return {name: file_sum(folder / f"{name}.safetensors").sha256 for name in ("model", "optimizer")}


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_stop_and_resume_is_exact(tmp_path: Path, precision: str, optimizer: str) -> None:
    def config(name: str) -> Config:
        config = make_config(tmp_path / name, precision=precision)
        config.optim.name = optimizer
        return config

    code, whole = run(config("whole"))
    assert (code, whole.events) == (0, ["start", "evaluate 6", "finished"])
    assert whole.saved == ["step_00000002", "step_00000004", "step_00000006"]
    code, first = run(config("parts"), StopAfter(3, signal.SIGTERM))
    assert (code, first.events, first.saved[-1]) == (0, ["start", "stopped"], "step_00000003")
    code, second = run(config("parts"))
    assert code == 0
    assert first.numbers() + second.numbers() == whole.numbers()
    assert final_sums(tmp_path / "parts") == final_sums(tmp_path / "whole")
    assert [r.get("eval_loss") for r in second.records][-1] == whole.records[-1]["eval_loss"]
    code, nothing = run(config("parts"))
    assert (code, nothing.records, nothing.saved) == (0, [], [])


def test_bias_and_biased_routing_survive_bit_equal(tmp_path: Path) -> None:
    trainer, run_dir = pretrain.build_trainer(make_config(tmp_path), [])
    trainer.run()
    run_dir.close()
    name = "blocks.1.ffn.router.selection_bias"
    bias = trainer.model.get_buffer(name)
    assert bias.abs().max() > 0
    folder = newest_whole(tmp_path / "checkpoints")
    assert folder is not None
    assert torch.equal(read_tensors(folder / "model.safetensors")[name], bias)
    for path in (tmp_path, folder):
        model, config, tokenizer = load_model_for_inference(path)
        assert torch.equal(model.get_buffer(name), bias)
        assert (config.seed, tokenizer.is_file(), model.training) == (1234, True, False)
        tokens = torch.arange(20)[None]
        trainer.model.eval()
        assert torch.equal(model.logits(tokens), trainer.model.logits(tokens))


def test_evaluation_changes_nothing(tmp_path: Path) -> None:
    def config(name: str, every: int) -> Config:
        config = make_config(tmp_path / name, eval_every=every)
        config.model.moe.router.jitter = 0.1
        return config

    _, often = run(config("often", 1))
    _, once = run(config("once", 0))
    assert often.numbers() == once.numbers()
    assert often.events == ["start", *(f"evaluate {step}" for step in range(1, 7)), "finished"]
    assert final_sums(tmp_path / "often") == final_sums(tmp_path / "once")


def test_batch_ramp_reads_the_stream_without_gaps(tmp_path: Path) -> None:
    config = make_config(tmp_path)
    config.train.batch_ramp.start, config.train.batch_ramp.steps = 1, 3
    trainer, run_dir = pretrain.build_trainer(config, [])
    seen: list[tuple[int, int]] = []
    real = trainer.train_stream.batch
    trainer.train_stream.batch = lambda start, count: seen.append((start, count)) or real(start, count)  # type: ignore[method-assign,func-returns-value]
    trainer.run()
    run_dir.close()
    assert seen == [(0, 1), (1, 2), (3, 3), (6, 4), (10, 4), (14, 4)]
    state = read_state(tmp_path / "checkpoints" / "step_00000006")
    assert (state["consumed_sequences"], state["tokens"]) == (18, 18 * 32)


def test_more_steps_continue_a_finished_run(tmp_path: Path) -> None:
    def config(steps: int) -> Config:
        config = make_config(tmp_path / str(steps), steps=steps)
        config.optim.schedule.name = "constant"
        return config

    _, long = run(config(6))
    run(config(3))
    longer = config(3)
    longer.train.steps = 6
    _, rest = run(longer)
    assert rest.numbers() == long.numbers()[3:]


def test_ctrl_c_is_130_and_signals_during_evaluation_are_heard(tmp_path: Path) -> None:
    config = make_config(tmp_path, eval_every=1, eval_sequences=4)
    trainer, run_dir = pretrain.build_trainer(config, [log := Log()])
    assert trainer.valid_stream is not None
    real = trainer.valid_stream.batch

    def batch(start: int, count: int):
        signal.raise_signal(signal.SIGINT)
        return real(start, count)

    trainer.valid_stream.batch = batch  # type: ignore[method-assign]
    assert trainer.run() == 130
    run_dir.close()
    assert (log.events, log.saved) == (["start", "stopped"], ["step_00000001"])
    assert "eval_loss" not in log.records[0]


class Poison(Callback):
    """Makes the run diverge after `step`."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_start(self, trainer: Trainer) -> None:
        self.trainer = trainer

    def on_step(self, record: Record) -> None:
        if record["step"] == self.step:
            with torch.no_grad():
                self.trainer.model.head.weight[0, 0] = float("nan")


def test_too_many_skipped_steps_fail_the_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = make_config(tmp_path, steps=20, max_skipped_steps=3)
    log = Log()
    trainer, run_dir = pretrain.build_trainer(config, [log, Poison(3)])
    with pytest.raises(RunError, match=r"step 6: loss nan.*3 steps in a row .*train\.max_skipped_steps=3.*run\.resume=PATH"):
        trainer.run()
    run_dir.close()
    assert log.events[-1] == "failed"
    assert [r["skipped"] for r in log.records] == [0, 0, 0, 1, 2]
    assert "step 4: loss nan" in capsys.readouterr().err


def refused(config: Config, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        pretrain.build_trainer(config, [])


def test_another_model_lists_the_tensors_that_differ(tmp_path: Path) -> None:
    run(make_config(tmp_path, steps=2))
    other = make_config(tmp_path, steps=4)
    other.model.moe.num_experts, other.model.mtp.depth = 8, 0
    refused(
        other,
        r"step_00000002 is of another model: \d+ of \d+ tensors differ\. "
        r"blocks\.1\.ffn\.experts\.down_proj: \[4, 32, 16\] float32 in the checkpoint, \[8, 32, 16\] float32 here; .*"
        r"mtp\.0\..*only in the checkpoint.* … and \d+ more\. Use the config it was made with \(.*config\.yaml\), or another run\.dir",
    )


def test_other_data_are_refused(tmp_path: Path) -> None:
    run(make_config(tmp_path, steps=2))
    seed = make_config(tmp_path, steps=4)
    seed.seed = 1
    refused(seed, r"cannot be continued exactly: seed was 1234, now 1")
    data = make_config(tmp_path, steps=4)
    data.data.max_bytes = 250_000
    refused(data, r"data\.max_bytes was 200000, now 250000")


def test_a_pickle_in_the_place_of_weights_is_refused(tmp_path: Path) -> None:
    run(make_config(tmp_path, steps=2))
    folder = tmp_path / "checkpoints" / "step_00000002"
    weights = folder / "model.safetensors"
    weights.write_bytes(b"\x80\x04\x8c\x05posix\x8c\x06system\x93\x8c\x04true\x85R.")
    manifest = json.loads((folder / "manifest.json").read_text())
    total = file_sum(weights)
    manifest["files"]["model.safetensors"] = {"size": total.size, "sha256": total.sha256}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    refused(make_config(tmp_path, steps=4), "not a safetensors file")
    with pytest.raises(ConfigError, match="not a safetensors file"):
        load_model_for_inference(tmp_path)


def test_a_disk_that_refuses_metrics_fails_the_run_in_words(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").mkdir()
    with pytest.raises(RunError, match=r"metrics\.jsonl: Is a directory\. The checkpoints in .* are untouched; the same command continues"):
        pretrain.run(make_config(tmp_path, steps=2))


def test_evaluation_without_a_validation_split(tmp_path: Path) -> None:
    config = make_config(tmp_path / "a", eval_every=2)
    config.data.split = "100,0,0"
    refused(config, r"train\.eval_every=2 needs a validation split, but data\.split=100,0,0")
    config = make_config(tmp_path / "b", steps=2)
    config.data.split = "100,0,0"
    _, log = run(config)
    assert log.events == ["start", "finished"]


def test_device_and_threads(tmp_path: Path) -> None:
    refused(make_config(tmp_path, device="abacus"), "train.device=abacus is not a device")
    refused(make_config(tmp_path, threads=0), "train.threads=0")
    if not torch.accelerator.is_available():
        refused(make_config(tmp_path, device="cuda"), "train.device=cuda is not here; this machine has no accelerator")


def test_inference_from_nothing(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is not a folder"):
        load_model_for_inference(tmp_path / "missing")
    (tmp_path / "checkpoints").mkdir()
    with pytest.raises(ConfigError, match="holds no checkpoint yet"):
        load_model_for_inference(tmp_path)
