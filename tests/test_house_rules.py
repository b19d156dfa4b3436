"""The rules of the house, as far as a machine can check them."""

import ast
import importlib
import inspect
import re
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "penstock"
MAX_MODULE_LINES = 450
MAX_FUNCTION_LINES = 70

# A module imports only from those before it; the modules of a package with a star may import each other.
ORDER = [
    *("errors", "clock", "events", "process", "names", "disk", "storage", "parquet"),
    *("state.keys", "state.codec", "state.key_codecs", "state.segments", "state.store", "state.replica"),
    *("topic_log", "topics", "sources", "files"),
    *("epochs.records", "epochs.protocol", "epochs.compaction", "epochs.coordinator"),
    *("columns", "plan", "batches", "failures", "state.key_table", "state.overlay"),
    *("state.parts", "state.collections", "state.timers", "state.handles", "state.query"),
    *("operators", "logic", "printing", "stream", "exchange", "inputs", "sinks", "outputs", "task", "runner"),
    *("spark.*", "application"),
    "testing.*",
    "__init__",
]


def modules() -> list[Path]:
    return sorted(SOURCE.rglob("*.py"))


def dotted(path: Path) -> str:
    """`state.keys` for src/penstock/state/keys.py, `state` for the package itself, `__init__` for penstock itself."""
    parts = path.relative_to(SOURCE).with_suffix("").parts
    return ".".join(parts if parts == ("__init__",) or parts[-1] != "__init__" else parts[:-1])


def rank(module: str) -> int | None:
    """Where a module stands in the order; a package stands where its last module does; None if it is not listed."""
    package = module.split(".")[0]
    inside = [place for place, name in enumerate(ORDER) if name == module or name == f"{package}.*"]
    last_of_package = [place for place, name in enumerate(ORDER) if name.startswith(f"{module}.")]
    return max(inside + last_of_package, default=None)


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def imported(path: Path) -> Iterator[str]:
    """The full names that a module imports: `a.b` for `import a.b`, and `a.b.c` for `from a.b import c`."""
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def module_of(name: str) -> str:
    """The module of ours, in dotted form, that an imported full name comes from."""
    parts = name.split(".")[1:]
    while parts:
        if SOURCE.joinpath(*parts).with_suffix(".py").exists() or SOURCE.joinpath(*parts, "__init__.py").exists():
            return ".".join(parts)
        parts.pop()
    return "__init__"


each_module = pytest.mark.parametrize("path", modules(), ids=dotted)


@each_module
def test_module_has_its_place_in_the_order(path: Path) -> None:
    assert rank(dotted(path)) is not None, f"{path.relative_to(ROOT)} is not in ORDER; decide what it may import"


@each_module
def test_imports_go_only_downwards(path: Path) -> None:
    own = rank(dotted(path))
    for source in {module_of(name) for name in imported(path) if name.split(".")[0] == "penstock"}:
        place = rank(source)
        if own is None or place is None:
            continue  # test_module_has_its_place_in_the_order says so, once
        same_package = place == own and ORDER[own].endswith(".*")
        assert same_package or place < own, f"{dotted(path)} imports {source}, which does not come before it in ORDER"


@each_module
def test_only_the_spark_package_imports_pyspark(path: Path) -> None:
    if dotted(path).split(".")[0] != "spark":
        assert not [name for name in imported(path) if name.split(".")[0] in ("pyspark", "py4j")]


@each_module
def test_nothing_is_pickled(path: Path) -> None:
    pickles = {"pickle", "cPickle", "_pickle", "cloudpickle", "dill", "shelve", "marshal"}
    assert not pickles.intersection(name.split(".")[0] for name in imported(path))


@each_module
def test_module_says_what_it_is(path: Path) -> None:
    assert ast.get_docstring(tree(path)), "open the module with a docstring"


@each_module
def test_module_is_small(path: Path) -> None:
    lines = len(path.read_text(encoding="utf-8").splitlines())
    assert lines <= MAX_MODULE_LINES, f"{lines} lines; split it by what it does"


@each_module
def test_functions_are_small(path: Path) -> None:
    functions = [node for node in ast.walk(tree(path)) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    lengths = {function.name: function.end_lineno - function.lineno + 1 for function in functions}
    assert not {name: length for name, length in lengths.items() if length > MAX_FUNCTION_LINES}


@pytest.fixture(params=["penstock", "penstock.testing"])
def face(request: pytest.FixtureRequest) -> ModuleType:
    return importlib.import_module(request.param)


def test_public_means_in_all(face: ModuleType) -> None:
    public = {name for name, value in vars(face).items() if not name.startswith("_") and not inspect.ismodule(value)}
    assert public == set(face.__all__)


def test_all_is_in_order(face: ModuleType) -> None:
    def constants_classes_functions(name: str) -> tuple[int, str]:
        return (0 if name.isupper() else 1 if name[0].isupper() else 2, name)

    assert face.__all__ == sorted(set(face.__all__), key=constants_classes_functions)


def test_every_public_name_shows_an_example(face: ModuleType) -> None:
    explained = [name for name in face.__all__ if inspect.isclass(getattr(face, name)) or callable(getattr(face, name))]
    assert not [name for name in explained if ">>>" not in (getattr(face, name).__doc__ or "")]


def tracked_texts() -> Iterator[tuple[str, str]]:
    """Every file that is in the repository or about to be, with its text."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    if listed.returncode != 0:
        pytest.skip("not a git repository, so nothing says which files belong to it")
    for name in filter(None, listed.stdout.split("\0")):
        path = ROOT / name
        data = path.read_bytes() if path.is_file() else b""
        if b"\0" not in data:  # a picture is no text
            yield name, data.decode("utf-8", errors="ignore")


def test_nothing_is_left_for_later() -> None:
    mark = re.compile(r"\b(" + "|".join(["TO" + "DO", "FIX" + "ME", "XX" + "X"]) + r")\b")
    assert not [name for name, text in tracked_texts() if mark.search(text)]


def test_no_path_of_one_machine_is_written_down() -> None:
    homes = "|".join(["home", "root", "Users", "work"])
    machine_path = re.compile(rf"(?<![\w.~:/*<>)}}\]-])/({homes})/")
    assert not [name for name, text in tracked_texts() if machine_path.search(text)]
