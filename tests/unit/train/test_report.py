"""The report, the charts, the console and the loggers, on what real tiny runs write."""

from __future__ import annotations

import json
import os
import re
import sys
import xml.etree.ElementTree as ET
from html.parser import HTMLParser
from pathlib import Path

import pytest

from moe_train.cli import main
from moe_train.config import ConfigError
from moe_train.train import loggers
from moe_train.train.console import clock, line, smoothed
from moe_train.train.loggers import check_loggers, scalars
from moe_train.train.report import render
from moe_train.train.svg import heatmap, line_chart, number, ticks

SMOKE = ["pretrain", "+experiment=smoke", "train.steps=4"]


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("report") / "run"
    assert main([*SMOKE, f"run.dir={folder}", "log.loggers=[tensorboard]", "run.name='a<b>&c'"]) == 0
    return folder


class Balanced(HTMLParser):
    """Checks that every tag is closed in order."""

    VOID = ("meta", "br", "link")

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_report_is_whole_and_self_contained(run_dir: Path) -> None:
    page = (run_dir / "report.html").read_text()
    parser = Balanced()
    parser.feed(re.sub(r"<(rect|circle|line|polyline)([^>]*)/>", r"<\1\2></\1>", page))
    assert parser.open == []
    assert not re.search(r"""(src|href)=["']|@import|url\(|https?://""", page)
    for title in ("Loss", "Load balance", "Learning rate", "Gradient norm", "Throughput", "Expert load, layer 1", "Config"):
        assert f"<h2>{title}</h2>" in page
    assert "prefers-color-scheme:dark" in page
    assert "a&lt;b&gt;&amp;c" in page
    assert "<b>&c" not in page
    for chart in re.findall(r"<svg.*?</svg>", page, flags=re.DOTALL):
        ET.fromstring(chart)


def test_report_shows_the_last_numbers(run_dir: Path) -> None:
    last = json.loads((run_dir / "metrics.jsonl").read_text().splitlines()[-1])
    page = render(run_dir, "x", "stopped")
    assert f"<b>{last['loss']:.4f}</b>" in page
    assert f"<b>{last['bits_per_byte']:.4f}</b>" in page
    assert "stopped at step 4" in page


def test_report_of_a_run_without_a_step(tmp_path: Path) -> None:
    assert "no step" in render(tmp_path, "empty", "stopped")


def test_utilisation_is_measured(run_dir: Path) -> None:
    records = [json.loads(text) for text in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert all(0 < record["utilisation"] < 1.5 for record in records)


def test_loads_sum_to_the_choices_of_the_step(run_dir: Path) -> None:
    loads = [json.loads(text) for text in (run_dir / "loads.jsonl").read_text().splitlines()]
    assert [record["step"] for record in loads] == [1, 2, 3, 4]
    assert sum(loads[0]["load"]["1"]) == 16 * 64 * 2


def test_tensorboard_has_every_step(run_dir: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run_dir / "tensorboard"))
    events.Reload()
    assert [event.step for event in events.Scalars("loss")] == [1, 2, 3, 4]
    assert len(events.Scalars("max_vio_per_layer/0")) == 4


def test_wandb_offline(tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    assert os.environ["WANDB_MODE"] == "offline"
    assert main([*SMOKE, f"run.dir={tmp_path / 'run'}", "log.loggers=[wandb]", "log.console=false"]) == 0
    assert list((tmp_path / "run" / "wandb").glob("offline-run-*"))


def test_mlflow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    assert main([*SMOKE, f"run.dir={tmp_path / 'run'}", "log.loggers=[mlflow]", "log.console=false"]) == 0
    client = mlflow.MlflowClient(tracking_uri=(tmp_path / "run" / "mlruns").as_uri())
    run_id = (tmp_path / "run" / "mlflow_id").read_text()
    assert [metric.step for metric in client.get_metric_history(run_id, "loss")] == [1, 2, 3, 4]


def test_a_missing_or_unknown_logger_is_refused_before_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="Did you mean `wandb`"):
        check_loggers(["wandbb"])
    monkeypatch.setitem(sys.modules, "wandb", None)
    monkeypatch.setattr(loggers.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'moe-train\[wandb\]'"):
        check_loggers(["wandb"])


def test_log_every_keeps_the_last_step(tmp_path: Path) -> None:
    assert main([*SMOKE, f"run.dir={tmp_path / 'run'}", "log.every=3", "log.report=false", "log.console=false"]) == 0
    steps = [json.loads(text)["step"] for text in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert steps == [3, 4]
    assert not (tmp_path / "run" / "report.html").exists()


def test_plain_lines(run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    assert main([*SMOKE, f"run.dir={tmp_path / 'run'}"]) == 0
    out = capsys.readouterr().out
    assert "step 1/4 loss" in out
    assert re.search(r"step 4/4 loss .* valid .* bits/byte.* tokens/s .* of the matmul peak.* MaxVio .* 0:00:00 left", out)
    assert main([*SMOKE, f"run.dir={tmp_path / 'quiet'}", "log.console=false"]) == 0
    assert "step" not in capsys.readouterr().out


def test_words_of_the_console() -> None:
    assert clock(3723.4) == "1:02:03"
    assert smoothed(None, 10.0) == 10.0
    assert smoothed(10.0, 20.0) == pytest.approx(12.0)
    assert line({"loss": 1.0, "model_flops_per_s": 2e9}, 1234.0) == "loss 1.0000 · 1,234 tokens/s · 2 GFLOP/s"


def test_scalars_flatten_lists() -> None:
    assert scalars({"step": 3, "loss": 1.5, "per": [1, 2.0]}) == {"loss": 1.5, "per/0": 1.0, "per/1": 2.0}


def test_line_chart_places_points_and_leaves_out_what_is_not_finite() -> None:
    chart = line_chart([("a", [0, 1, 2, 3], [0.0, float("nan"), 5.0, 10.0])], "step", "y")
    points = re.search(r'points="([^"]*)"', chart)
    assert points is not None
    places = [tuple(map(float, pair.split(","))) for pair in points.group(1).split()]
    assert len(places) == 3
    assert places[0] == (62.0, 210.0)
    assert places[-1] == (548.0, 12.0)
    assert "nothing was recorded" in line_chart([("a", [], [])], "x", "y")
    assert "legend" in line_chart([("a", [0, 1], [1, 1]), ("b", [0, 1], [2, 2])], "x", "y")


def test_heatmap_colours() -> None:
    chart = heatmap([[1.0, 0.0], [2.0, 9.0]], [1, 2], "step", "expert")
    assert re.findall(r'fill="(#[0-9a-f]{6})"', chart) == ["#f5f5f5", "#2166ac", "#b2182b", "#b2182b"]
    assert "nothing was recorded" in heatmap([], [], "x", "y")


@pytest.mark.parametrize(("low", "high"), [(0, 1), (3, 1234567), (0.001, 0.0042), (-5, 5), (1e-9, 2e-9)])
def test_ticks_are_few_round_and_inside(low: float, high: float) -> None:
    found = ticks(low, high)
    assert 2 <= len(found) <= 6
    assert all(low - 1e-12 <= tick <= high * (1 + 1e-9) for tick in found)


def test_short_numbers() -> None:
    assert [number(v) for v in (1_200_000, 30_000, 0.05, 1500, 2e9)] == ["1.2M", "30k", "0.05", "1500", "2G"]
