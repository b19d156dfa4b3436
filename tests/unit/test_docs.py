"""The documentation is true: its programs run, its links lead somewhere, its words are those of the code."""

import doctest
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pytest

from penstock import topic_log
from penstock.epochs.coordinator import Claim
from penstock.epochs.records import Changes, Compacted, Counts, EpochRecord, Format, OutboxRef, View
from penstock.process import Owner
from penstock.state import segments
from penstock.state.segments import SegmentRef
from penstock.topic_log import Position

ROOT = Path(__file__).parent.parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("benchmarks/*.md")])
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)
FENCED = re.compile(r"^```.*?^```$", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"(?<!!)\[[^\]]+\]\(([^)\s]+)\)")
GLOSSARY_ROW = re.compile(r"^\| \*\*(?P<word>[^*]+)\*\* \|.*\| (?P<places>[^|]+) \|$", re.MULTILINE)
PLACE = re.compile(r"\[`(?P<name>[^`]+)`\]\((?P<path>[^)#]+)\)")

each_page = pytest.mark.parametrize("page", PAGES, ids=[str(page.relative_to(ROOT)) for page in PAGES])


def blocks(page: Path) -> list[tuple[int, str]]:
    """The Python blocks of a page, each with the line of its first line."""
    text = page.read_text(encoding="utf-8")
    return [(text.count("\n", 0, found.start(1)), found[1]) for found in BLOCK.finditer(text)]


def run(code: str, page: Path, line: int, names: dict[str, Any]) -> None:
    if not code.lstrip().startswith(">>>"):
        # Lines are counted as in the page, so that a traceback leads there.
        exec(compile("\n" * line + code, str(page), "exec"), names)
        return
    test = doctest.DocTestParser().get_doctest(code, names, page.name, str(page), line)
    said: list[str] = []
    flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    runner = doctest.DocTestRunner(optionflags=flags)
    runner.run(test, out=said.append, clear_globs=False)
    assert runner.failures == 0, "".join(said)
    names.update(test.globs)


def on_spark(page: Path) -> bool:
    return any("app.run(" in code for _, code in blocks(page))


@pytest.mark.parametrize("page", [p for p in PAGES if on_spark(p)], ids=lambda page: str(page.relative_to(ROOT)))
def test_every_python_block_of_a_page_on_spark_runs(page: Path, tmp_path: Path) -> None:
    (tmp_path / "temporary").mkdir()
    environment = {**os.environ, "TMPDIR": str(tmp_path / "temporary")}
    command = [sys.executable, __file__, str(page)]
    said = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=600)
    assert said.returncode == 0, said.stderr


@pytest.mark.parametrize("page", [p for p in PAGES if not on_spark(p)], ids=lambda page: str(page.relative_to(ROOT)))
def test_every_python_block_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TMPDIR", str(tmp_path / "temporary"))
    monkeypatch.setattr("tempfile.tempdir", None)
    (tmp_path / "temporary").mkdir()
    names: dict[str, Any] = {"__name__": page.stem}
    for line, code in blocks(page):
        run(code, page, line, names)


def test_there_are_blocks_to_run() -> None:
    assert {"README.md", "CONTRIBUTING.md", "docs/guide.md"} <= {
        str(page.relative_to(ROOT)) for page in PAGES if blocks(page)
    }


def anchors(page: Path) -> set[str]:
    """What the headings of a page can be linked by."""
    headings = re.findall(r"^#+ (.+)$", FENCED.sub("", page.read_text(encoding="utf-8")), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@each_page
def test_every_relative_link_leads_somewhere(page: Path) -> None:
    broken = []
    for target in LINK.findall(FENCED.sub("", page.read_text(encoding="utf-8"))):
        if "://" in target:
            continue
        path, _, anchor = target.partition("#")
        found = (page.parent / path).resolve() if path else page
        if not found.exists() or (anchor and anchor not in anchors(found)):
            broken.append(target)
    assert not broken


def test_every_page_can_be_reached_from_the_readme() -> None:
    todo, seen = [ROOT / "README.md"], set()
    while todo:
        page = todo.pop()
        if page in seen:
            continue
        seen.add(page)
        for target in LINK.findall(FENCED.sub("", page.read_text(encoding="utf-8"))):
            path = (page.parent / target.partition("#")[0]).resolve()
            if "://" not in target and path.suffix == ".md" and path.is_file():
                todo.append(path)
    assert seen >= set(PAGES)


def glossary() -> list[tuple[str, str, str]]:
    """Each word of the glossary, with the names in code and the files that it claims."""
    text = (ROOT / "docs" / "glossary.md").read_text(encoding="utf-8")
    return [
        (row["word"], place["name"], place["path"])
        for row in GLOSSARY_ROW.finditer(text)
        for place in PLACE.finditer(row["places"])
    ]


def test_the_glossary_names_a_place_for_each_word() -> None:
    text = (ROOT / "docs" / "glossary.md").read_text(encoding="utf-8")
    words = re.findall(r"^\| \*\*([^*]+)\*\*", text, re.MULTILINE)
    assert len(words) >= 25
    assert len(words) == len(set(words))
    assert set(words) == {word for word, _, _ in glossary()}


@pytest.mark.parametrize(("word", "name", "path"), glossary())
def test_the_glossarys_words_are_in_the_code(word: str, name: str, path: str) -> None:
    text = (ROOT / "docs" / path).read_text(encoding="utf-8")
    assert re.search(rf"(?<!\w){re.escape(name)}(?!\w)", text), f"{word}: there is no {name} in {path}"


@pytest.mark.parametrize(
    "stored", [Format, EpochRecord, View, Changes, Compacted, OutboxRef, SegmentRef, Counts, Position, Claim, Owner]
)
def test_the_protocol_page_names_every_stored_field(stored: type[msgspec.Struct]) -> None:
    text = (ROOT / "docs" / "protocol.md").read_text(encoding="utf-8")
    missing = [name for name in stored.__struct_fields__ if not re.search(rf"[`\"]{name}[`\"]", text)]
    assert not missing


@pytest.mark.parametrize("schema", [segments.SCHEMA, topic_log.SCHEMA], ids=["state", "topic"])
def test_the_protocol_page_names_every_stored_column(schema: pa.Schema) -> None:
    text = (ROOT / "docs" / "protocol.md").read_text(encoding="utf-8")
    assert not [name for name in schema.names if f"| `{name}` |" not in text]


def test_the_architecture_page_names_every_module() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    source = ROOT / "src" / "penstock"
    packages = ("testing", "spark")  # these are described as a whole
    modules = [path.relative_to(source) for path in sorted(source.rglob("*.py")) if path.name != "__init__.py"]
    assert not [str(path) for path in modules if path.parts[0] not in packages and f"penstock/{path})" not in text]


def test_the_text_is_plain() -> None:
    lines = [(page, line) for page in PAGES for line in page.read_text(encoding="utf-8").splitlines()]
    long = [line for _, line in lines if len(line) > 120 and not line.startswith("|")]
    assert not long


if __name__ == "__main__":  # in a process of its own, a page is the main program, as it is for whoever pastes it
    given, names = Path(sys.argv[1]), {"__name__": "__main__"}
    for at, block in blocks(given):
        run(block, given, at, names)
