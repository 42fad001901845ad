"""Verbs, Hydra's flags, sweeps, completion, exit codes."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

import moe_train.recipes as recipes
from moe_train.cli import main
from moe_train.cli.openmp import SPIN_COUNT, wait_briefly
from moe_train.config import Config, RunError


class Recipe:
    """In the place of recipes.pretrain: notes the config it is given and ends as told. (Training itself is tested below tests/e2e.)"""

    def __init__(self) -> None:
        self.configs: list[Config] = []
        self.error: BaseException | None = None

    def run(self, config: Config) -> int:
        self.configs.append(config)
        if self.error is not None:
            raise self.error
        return 0


@pytest.fixture
def recipe(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Recipe:
    recipe = Recipe()
    monkeypatch.setitem(sys.modules, "moe_train.recipes.pretrain", recipe)
    monkeypatch.setattr(recipes, "pretrain", recipe, raising=False)
    monkeypatch.chdir(tmp_path)
    return recipe


def test_overview(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    out = capsys.readouterr().out
    for verb in ("pretrain", "evaluate", "generate", "prepare-data", "inspect", "layout"):
        assert verb in out
    assert main([]) == 2
    assert main(["--version"]) == 0


def test_unknown_verb(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["pretrian"]) == 2
    assert "`pretrain`" in capsys.readouterr().err


def test_module_and_script_are_one_program() -> None:
    script = subprocess.run([Path(sys.executable).parent / "moe-train", "--help"], capture_output=True, text=True)
    module = subprocess.run([sys.executable, "-m", "moe_train", "--help"], capture_output=True, text=True)
    assert (script.returncode, script.stdout) == (0, module.stdout)


def test_experiment_and_overrides_reach_the_recipe(recipe: Recipe, tmp_path: Path) -> None:
    assert main(["pretrain", "+experiment=smoke", "train.steps=3", "run.dir=here"]) == 0
    (config,) = recipe.configs
    assert (config.train.steps, config.run.dir, config.model.hidden_size) == (3, "here", 64)
    assert not list(tmp_path.iterdir()), "Hydra writes nothing"


def test_help_and_cfg(recipe: Recipe, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["pretrain", "--help"]) == 0
    out = capsys.readouterr().out
    assert "experiment: balance_shootout, demo, smoke" in out
    assert main(["pretrain", "--cfg", "job", "+experiment=smoke"]) == 0
    assert "hidden_size: 64" in capsys.readouterr().out
    assert main(["pretrain", "--cfg", "job", "train.stepss=3"]) == 2
    assert "`train.steps`" in capsys.readouterr().err
    assert main(["pretrain", "--info", "searchpath"]) == 0
    assert not recipe.configs


def test_sweep_gives_each_job_its_folder(recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert main(["pretrain", "--multirun", "+experiment=smoke", "balance=none,aux", "seed=1,2"]) == 0
    assert [(c.run.dir, c.balance.name, c.seed) for c in recipe.configs] == [
        (f"runs/smoke/balance={balance},seed={seed}", balance, seed) for balance in ("none", "aux") for seed in (1, 2)
    ]
    assert {path.name for path in tmp_path.iterdir()} == {"runs"}


def test_sweep_over_the_name_of_the_run(recipe: Recipe) -> None:
    assert main(["pretrain", "-m", "+experiment=smoke", "run.name=a,b"]) == 0
    assert [c.run.dir for c in recipe.configs] == ["runs/a", "runs/b"]


def test_shootout_sweeps_over_every_balancer(recipe: Recipe) -> None:
    names = ["none", "aux", "seq_aux", "global_aux", "bias", "quantile"]
    assert main(["pretrain", "-m", "+experiment=balance_shootout", f"balance={','.join(names)}"]) == 0
    assert [c.balance.name for c in recipe.configs] == names
    assert len({c.seed for c in recipe.configs}) == 1


def test_a_refused_job_does_not_stop_the_sweep(recipe: Recipe, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["pretrain", "-m", "+experiment=smoke", "train.micro_batch=3,4"]) == 2
    assert [c.train.micro_batch for c in recipe.configs] == [4]
    assert "train.micro_batch=3" in capsys.readouterr().err


def test_a_sweep_into_a_folder_that_cannot_be(recipe: Recipe, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    assert main(["pretrain", "-m", "+experiment=smoke", "seed=1,2", f"run.dir={tmp_path}/file/runs"]) == 2
    error = capsys.readouterr().err
    assert f"a sweep cannot make its folder {tmp_path}/file" in error
    assert "Set run.dir" in error


def test_a_failed_job_sets_the_exit_code_of_the_sweep(recipe: Recipe) -> None:
    recipe.error = RunError("disk full")
    assert main(["pretrain", "-m", "+experiment=smoke", "seed=1,2"]) == 1
    assert len(recipe.configs) == 2


def test_exit_codes(recipe: Recipe, capsys: pytest.CaptureFixture[str]) -> None:
    recipe.error = RunError("disk full")
    assert main(["pretrain", "+experiment=smoke"]) == 1
    assert capsys.readouterr().err == "moe-train: failed: disk full\n"
    recipe.error = KeyboardInterrupt()
    assert main(["pretrain", "+experiment=smoke"]) == 130
    recipe.error = ZeroDivisionError("a bug")
    with pytest.raises(ZeroDivisionError):
        main(["pretrain", "+experiment=smoke"])
    recipe.error = ValueError("a bug too")
    with pytest.raises(ValueError, match="a bug too"):
        main(["pretrain", "+experiment=smoke"])


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("moe-train ", {"layout", "pretrain", "evaluate", "generate", "prepare-data", "inspect"}),
        ("moe-train pre", {"pretrain", "prepare-data"}),
        ("moe-train pretrain model=t", {"model=tiny_mla_moe"}),
        ("moe-train pretrain +experiment=s", {"+experiment=smoke"}),
        ("moe-train pretrain train.st", {"train.steps="}),
        ("moe-train inspect model=qwen3_3", {"model=qwen3_30b_a3b"}),
        ("moe-train generate runs", set()),
    ],
)
def test_tab_completion(line: str, expected: set[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COMP_LINE", line)
    assert main(["-sc", "query=bash"]) == 0
    assert set(capsys.readouterr().out.split()) == expected


def test_completion_script_completes_the_program(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--shell-completion", "install=bash"]) == 0
    assert capsys.readouterr().out.rstrip().endswith("hydra_bash_completion moe-train")


def test_inspect_counts_a_trillion_parameters_in_seconds(capsys: pytest.CaptureFixture[str]) -> None:
    start = time.perf_counter()
    assert main(["inspect", "model=kimi_k2", "--json", "--seq-len", "4096"]) == 0
    assert time.perf_counter() - start < 30
    facts = json.loads(capsys.readouterr().out)
    assert facts["parameters"]["total"] == 1_026_408_209_408
    assert facts["cache_bytes_per_token"]["bf16"] == 2 * 61 * 576
    assert facts["bytes"]["bf16 weights"] == 2 * 1_026_408_209_408
    assert facts["flops_per_token"]["training"] == 3 * facts["flops_per_token"]["forward"]


def test_inspect_prints_tables(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", "model=tiny_mla_moe", "model.scale=2"]) == 0
    assert "routed_experts" in capsys.readouterr().out
    assert main(["inspect", "model=tiny_mla_moe", "--seq-len", "100000"]) == 2
    assert "max_seq_len=4096" in capsys.readouterr().err
    assert main(["inspect", "model=tiny"]) == 2
    assert "`tiny_mla_moe`" in capsys.readouterr().err


def test_threads_wait_briefly_unless_the_user_says_otherwise() -> None:
    for given, expected in (
        ({}, {"GOMP_SPINCOUNT": SPIN_COUNT}),
        ({"OMP_WAIT_POLICY": "ACTIVE"}, {"OMP_WAIT_POLICY": "ACTIVE"}),
        ({"GOMP_SPINCOUNT": "7"}, {"GOMP_SPINCOUNT": "7"}),
    ):
        wait_briefly(given)
        assert given == expected
