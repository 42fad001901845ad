"""README and docs speak of things that exist: files, tests, config keys, models, verbs."""

from __future__ import annotations

import dataclasses
import re
import typing
from pathlib import Path

import pytest

from moe_train.config import Config

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]
TOP_LEVEL = ("moe_train", "parallel", "conf", "tests", "bench", "docs", "launch")


def prose(document: Path) -> str:
    """The text without its code blocks."""
    return re.sub(r"^```.*?^```", "", document.read_text(), flags=re.MULTILINE | re.DOTALL)


def in_backticks(document: Path) -> list[str]:
    return re.findall(r"`([^`\n]+)`", prose(document))


def config_keys(kind: type, prefix: str = "") -> set[str]:
    """Dotted names of every field and group below a config dataclass."""
    keys = set()
    hints = typing.get_type_hints(kind)
    for field in dataclasses.fields(kind):
        keys.add(prefix + field.name)
        if dataclasses.is_dataclass(hints[field.name]):
            keys |= config_keys(hints[field.name], f"{prefix}{field.name}.")
    return keys


KEYS = config_keys(Config)
GROUPS = {key.split(".")[0] for key in KEYS if "." in key}


def ids(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("document", DOCUMENTS, ids=ids)
def test_links_resolve(document: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(document)):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        file = (document.parent / path).resolve() if path else document
        assert file.exists(), f"{ids(document)} links to {target}"
        if anchor:
            titles = re.findall(r"^#+ (.*)$", file.read_text(), flags=re.MULTILINE)
            anchors = {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}
            assert anchor in anchors, f"{ids(document)} links to {target}"


@pytest.mark.parametrize("document", DOCUMENTS, ids=ids)
def test_named_files_and_tests_exist(document: Path) -> None:
    """`moe_train/model/loss.py`, `tests/unit/test_docs.py::test_links_resolve`; a `*` is a pattern."""
    for name in in_backticks(document):
        path, _, test = name.partition("::")
        if not re.fullmatch(r"[\w./*-]+", path) or path.split("/")[0] not in TOP_LEVEL or "/" not in path:
            continue
        found = list(ROOT.glob(path.rstrip("/"))) if "*" in path else [ROOT / path]
        assert found, f"{ids(document)} names {name}"
        assert all(file.exists() for file in found), f"{ids(document)} names {name}"
        if test:
            assert re.search(rf"^\s*def {test.split('[')[0]}\(", found[0].read_text(), flags=re.MULTILINE), f"{ids(document)} names {name}"


@pytest.mark.parametrize("document", DOCUMENTS, ids=ids)
def test_named_config_keys_exist(document: Path) -> None:
    """`train.steps`, `balance.bias=sign`: a dotted name whose first part is a config group."""
    for name in in_backticks(document):
        key = name.split("=")[0]
        if (
            re.fullmatch(r"[a-z_]+(\.[a-z_0-9]+)+", key)
            and key.split(".")[0] in GROUPS
            and not re.search(r"\.(py|md|yaml|json|jsonl|html)$", key)
        ):
            assert key in KEYS, f"{ids(document)} names the config key {key}"


def test_readme_lists_every_model_preset() -> None:
    text = (ROOT / "README.md").read_text()
    missing = [path.stem for path in (ROOT / "conf" / "model").glob("*.yaml") if f"`{path.stem}`" not in text]
    assert not missing, missing


def test_changelog_has_a_section_for_the_version() -> None:
    from moe_train import __version__

    text = (ROOT / "CHANGELOG.md").read_text()
    assert text.startswith("# Changelog\n")
    assert "## [Unreleased]" in text or f"## [{__version__}]" in text


def test_model_page_names_every_file_of_the_model() -> None:
    """A learner finds each part of the model from the page of equations."""
    text = (ROOT / "docs" / "model.md").read_text()
    folders = {ROOT / "moe_train" / "model" / "balancing", ROOT / "moe_train" / "model" / "moe" / "kernels"}
    files = [p for p in (ROOT / "moe_train" / "model").rglob("*.py") if p.name != "__init__.py" and p.parent not in folders]
    assert files
    assert all(ids(folder) + "/" in text for folder in folders)
    missing = [ids(path) for path in files if ids(path) not in text]
    assert not missing, missing
