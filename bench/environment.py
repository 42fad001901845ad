"""The peers' own environment, .venv-bench beside the repository's .venv: built when missing or when bench/requirements.txt changed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv-bench"
REQUIREMENTS = Path(__file__).with_name("requirements.txt")


def peer_python() -> str:
    """Path of the peers' Python, installing them first where needed."""
    python, stamp = VENV / "bin" / "python", VENV / "requirements.txt"
    if stamp.exists() and stamp.read_text() == REQUIREMENTS.read_text():
        return str(python)
    print("bench: installing the peers into .venv-bench (a few minutes, once)", file=sys.stderr)
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", str(VENV)], check=True)
    pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    # DeepSpeed's set-up imports torch and would compile its operators; neither is wanted.
    environment = {**os.environ, "DS_BUILD_OPS": "0"}
    torch = next(line for line in REQUIREMENTS.read_text().splitlines() if line.startswith("torch=="))
    subprocess.run([*pip, torch, "setuptools", "wheel", "numpy"], check=True, env=environment)
    subprocess.run([*pip, "--no-build-isolation", "-r", str(REQUIREMENTS)], check=True, env=environment)
    stamp.write_text(REQUIREMENTS.read_text())
    return str(python)
