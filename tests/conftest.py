"""What every test shares: one thread a process, fixed seeds, no network, and one cache folder a session.

The environment is set before anything imports torch; worker processes of pytest-xdist and commands started by tests inherit it.
"""

from __future__ import annotations

import logging
import os
import random
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

IS_WORKER = "PYTEST_XDIST_WORKER" in os.environ

os.environ["OMP_NUM_THREADS"] = "1"
os.environ["MPLBACKEND"] = "Agg"
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_DATASETS_OFFLINE"] = "1"
os.environ["WANDB_MODE"] = "offline"
os.environ["TERM"] = "dumb"
os.environ.pop("COLUMNS", None)
if not IS_WORKER:
    # Prepared corpora are keyed by content: the first test that needs one makes it, all workers share it, none of the user's is touched.
    os.environ["MOE_TRAIN_CACHE"] = tempfile.mkdtemp(prefix="moe_train_tests_")

settings.register_profile("project", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("project")


def pytest_unconfigure(config: pytest.Config) -> None:
    if not IS_WORKER:
        shutil.rmtree(os.environ["MOE_TRAIN_CACHE"], ignore_errors=True)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests below tests/oracle and tests/e2e carry the marker of their folder."""
    root = Path(__file__).parent
    for item in items:
        folder = item.path.relative_to(root).parts[0] if item.path.is_relative_to(root) else ""
        if folder in ("oracle", "e2e"):
            item.add_marker(folder)


@pytest.fixture(autouse=True)
def _seeded() -> None:
    """Fixed seeds before each test; torch only where a test module has imported it (config and CLI tests stay fast)."""
    random.seed(0)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(0)
    torch = sys.modules.get("torch")
    if torch is not None and hasattr(torch, "manual_seed"):
        torch.manual_seed(0)
        torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _logging_restored() -> Iterator[None]:
    """Hydra sets up the root logger with the stdout of the moment; the next test's stdout is another one."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.setLevel(level)
    for handler in [handler for handler in root.handlers if handler not in handlers]:
        root.removeHandler(handler)


@pytest.fixture(scope="session")
def repo_root() -> Path:
    return Path(__file__).resolve().parents[1]
