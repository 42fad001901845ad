"""Every command in README and docs is executed as written, or listed here with the shorter form that is executed or the reason why not.

The commands of one document run in their order in one empty folder, so a document is a session a reader can type.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = [path for path in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))) if path.exists()]

SHORTENED = {
    "make demo": "moe-train pretrain +experiment=demo run.dir=runs/demo train.steps=12 train.global_batch=4 train.micro_batch=4 "
    "train.eval_sequences=4 optim.schedule.warmup_steps=2 data.max_bytes=2000000 "
    "train.batch_ramp.start=null train.batch_ramp.increment=1 train.batch_ramp.steps=0",
}
"""Command as documented -> the same with fewer steps and less data."""

NOT_RUN = {
    "make setup": "is what built the environment that runs this test",
    "make test": "is what runs this test",
    "make test-fast": "is a part of `make test`",
    "make format": "would rewrite the work tree under test",
    ".venv/bin/pre-commit install": "would change the git hooks of the clone under test",
}


def commands_of(document: Path) -> list[str]:
    """Lines of the ```bash blocks, continuation lines joined, trailing comments cut."""
    blocks = re.findall(r"^```bash\n(.*?)^```", document.read_text(), flags=re.MULTILINE | re.DOTALL)
    lines = "\n".join(blocks).replace("\\\n", " ").splitlines()
    commands = [re.sub(r"\s+", " ", re.sub(r"(^|\s{2,})#.*", "", line)).strip() for line in lines]
    return [command for command in commands if command]


def environment() -> dict[str, str]:
    return {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}


def write_corpus(folder: Path) -> None:
    """What the documents call your own text: corpus.jsonl, one function's source of the standard library a line."""
    texts = [
        text
        for name in ("json", "email")
        for path in sorted(Path(os.__file__).parent.joinpath(name).glob("*.py"))
        for text in path.read_text(encoding="utf-8").split("\n\n\n")
    ]
    (folder / "corpus.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_commands_run(document: Path, tmp_path: Path) -> None:
    """Each exits with 0; `make` runs in the repository, all else in a folder that holds corpus.jsonl alone."""
    write_corpus(tmp_path)
    for command in commands_of(document):
        if command in NOT_RUN:
            continue
        typed = SHORTENED.get(command, command)
        folder = ROOT if re.match(r"(make |\.venv/)", typed) else tmp_path
        done = subprocess.run(["bash", "-euo", "pipefail", "-c", typed], cwd=folder, env=environment(), capture_output=True, text=True)
        assert done.returncode == 0, f"$ {typed}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"


def test_exceptions_are_still_documented() -> None:
    """A command that left the documents leaves the tables, too, and a reason is given for each that is not run."""
    documented = {command for document in DOCUMENTS for command in commands_of(document)}
    assert set(SHORTENED) | set(NOT_RUN) <= documented
    assert not set(SHORTENED) & set(NOT_RUN)
    assert all(reason.strip() for reason in NOT_RUN.values())


def test_make_demo_is_the_shortened_command() -> None:
    """What `make demo` types is what the tests run with fewer steps."""
    typed = subprocess.run(["make", "-n", "demo", "RUN_DIR=runs/demo"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert "moe-train pretrain +experiment=demo run.dir=runs/demo" in typed
    assert SHORTENED["make demo"].startswith("moe-train pretrain +experiment=demo run.dir=runs/demo ")
