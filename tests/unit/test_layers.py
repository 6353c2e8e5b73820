"""The house rules that can be read from the source: direction of imports, sizes, places, words."""

from __future__ import annotations

import ast
import graphlib
import re
import subprocess
import sys
import tomllib
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "nbdist"

# From the top; an import goes to the same unit or to a lower line. Units of one line are strangers.
LAYERS = [
    {"notebook"},
    {"cluster", "rank"},
    {"serve"},
    {"train"},
    {"doctor"},
    {"bulk", "runfiles"},
    {"errors", "messages", "keeper", "ports"},
]
TOPS = {"", "__main__", "testing"}  # may import anything; nothing below imports the last two
HEIGHT = {unit: -depth for depth, units in enumerate(LAYERS) for unit in units}

MAX_FILE_LINES = 300
MAX_FUNCTION_LINES = 40
MAX_IMPORT_SECONDS = 0.5  # about five times what is seen on an idle machine
PLACE = re.compile(r"\(([^()]*\b(?:client|ranks?|browser|anywhere)\b[^()]*)\)")


class Import(NamedTuple):
    """One import of an nbdist module by another."""

    source: str
    target: str
    line: int
    at_module_level: bool


@cache
def _modules() -> dict[str, tuple[Path, ast.Module]]:
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = ("nbdist", *path.relative_to(PACKAGE).with_suffix("").parts)
        name = ".".join(parts).removesuffix(".__init__")
        found[name] = (path, ast.parse(path.read_text(encoding="utf-8"), str(path)))
    return found


def _unit(module: str) -> str:
    return module.split(".")[1] if "." in module else ""


def _walk_imports(node: ast.AST, at_module_level: bool) -> Iterator[tuple[ast.stmt, bool]]:
    """Yield the import statements that run; those for type checkers only are left out."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.dump(child.test):
            continue
        if isinstance(child, ast.Import | ast.ImportFrom):
            yield child, at_module_level
        inside = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        yield from _walk_imports(child, at_module_level and not inside)


def _targets(source: str, statement: ast.stmt) -> Iterator[str]:
    """Yield the absolute dotted names that a statement imports."""
    if isinstance(statement, ast.Import):
        yield from (alias.name for alias in statement.names)
        return
    assert isinstance(statement, ast.ImportFrom)
    base = statement.module or ""
    if statement.level:
        is_package = _modules()[source][0].name == "__init__.py"
        parts = source.split(".")
        parts = parts[: len(parts) - statement.level + is_package]
        base = ".".join([*parts, base] if base else parts)
    for alias in statement.names:
        deeper = f"{base}.{alias.name}"
        yield deeper if deeper in _modules() else base


@cache
def _imports() -> tuple[Import, ...]:
    return tuple(
        Import(source, target, statement.lineno, at_module_level)
        for source, (_, tree) in _modules().items()
        for statement, at_module_level in _walk_imports(tree, True)
        for target in _targets(source, statement)
        if target.split(".")[0] == "nbdist"
    )


def _place(tree: ast.Module) -> str:
    first_paragraph = (ast.get_docstring(tree) or "").split("\n\n")[0].replace("\n", " ")
    match = PLACE.search(first_paragraph)
    return match.group(1) if match else ""


def _run_python(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code],
        check=False,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


# --- direction of imports -------------------------------------------------------------------


def test_every_module_belongs_to_a_known_layer():
    unknown = {name for name in _modules() if _unit(name) not in TOPS | set(HEIGHT)}

    assert not unknown, "give each a line in LAYERS"


def test_imports_between_layers_point_down_only():
    upward = [
        f"{found.source}:{found.line} imports {found.target}"
        for found in _imports()
        if (above := _unit(found.source)) not in TOPS
        and (below := _unit(found.target)) not in {"", above}
        and not HEIGHT.get(below, 1) < HEIGHT[above]
        # a client starts ranks: it may look into their code, inside functions
        and not (above == "cluster" and below == "rank" and not found.at_module_level)
    ]

    assert upward == []


def test_lowest_layers_import_the_standard_library_only():
    allowed = sys.stdlib_module_names | {"nbdist"}
    foreign = {
        f"{name} imports {target}"
        for name in ("nbdist.errors", "nbdist.messages", "nbdist.keeper", "nbdist.runfiles")
        for statement, _ in _walk_imports(_modules()[name][1], True)
        for target in _targets(name, statement)
        if target.split(".")[0] not in allowed
    }

    assert not foreign


def test_modules_import_each_other_without_a_cycle():
    graph = {name: set() for name in _modules()}
    for found in _imports():
        if found.at_module_level and found.target != found.source:
            graph[found.source].add(found.target)

    order = list(graphlib.TopologicalSorter(graph).static_order())  # raises with the cycle's names

    assert set(order) >= set(graph)


def test_every_library_that_is_imported_is_required_by_the_project():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    named = ("plot", "hf", "serve", "tune", "vllm")
    texts = [*project["dependencies"], *(text for name in named for text in extras[name])]
    required = {re.match(r"[\w-]+", text).group() for text in texts}
    distributions = {
        "IPython": "ipython",
        "zmq": "pyzmq",
        "prometheus_client": "prometheus-client",
    }
    with_others = {"jupyter_client", "jupyter_core", "nbformat", "traitlets", "pydantic", "jinja2"}

    used = {
        target.split(".")[0]
        for name, (_, tree) in _modules().items()
        for statement, _ in _walk_imports(tree, True)
        for target in _targets(name, statement)
    } - sys.stdlib_module_names
    used.add("cloudpickle")  # ipyparallel imports it for `use_cloudpickle`

    missing = {distributions.get(name, name) for name in used - with_others} - required
    assert missing - {"nbdist"} == set()


# --- what an import loads -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("module", "unwanted"),
    [
        ("nbdist", ["torch", "IPython", "ipyparallel", "numpy"]),
        ("nbdist.messages", ["torch", "IPython", "ipyparallel", "numpy"]),
        ("nbdist.serve", ["torch", "IPython", "ipyparallel"]),
        ("nbdist.train", ["IPython", "ipyparallel"]),
        ("nbdist.__main__", ["torch", "ipyparallel", "nbclient"]),
    ],
)
def test_import_of_a_package_loads_nothing_heavy(module, unwanted):
    code = f"import sys, {module}; print([name for name in {unwanted} if name in sys.modules])"

    assert _run_python(code) == "[]"


def test_import_of_everything_outside_the_ranks_loads_no_torch():
    light = [
        name
        for name, (_, tree) in _modules().items()
        if re.search(r"\b(client|anywhere|browser|torch-free)\b", _place(tree))
    ]
    code = (
        "import importlib, sys\n"
        f"for name in {light}:\n"
        "    importlib.import_module(name)\n"
        "    assert 'torch' not in sys.modules, f'{name} loads torch'\n"
        "print('torch' in sys.modules)"
    )

    assert _run_python(code) == "False"


def test_import_nbdist_takes_less_than_half_a_second():
    code = (
        "from time import perf_counter as now; began = now(); import nbdist; print(now() - began)"
    )

    best = min(float(_run_python(code)) for _ in range(3))

    assert best < MAX_IMPORT_SECONDS


# --- size and form --------------------------------------------------------------------------


def test_files_of_the_package_stay_under_the_size_limit():
    suffixes = {".py", ".js", ".css"}
    sizes = {
        str(path.relative_to(ROOT)): len(path.read_text(encoding="utf-8").splitlines())
        for path in PACKAGE.rglob("*")
        if path.suffix in suffixes
    }

    assert {name: size for name, size in sizes.items() if size > MAX_FILE_LINES} == {}


def test_functions_without_their_docstrings_stay_under_the_size_limit():
    too_long = {}
    for name, (_, tree) in _modules().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                size = node.end_lineno - node.lineno + 1
                if ast.get_docstring(node) is not None:
                    text = node.body[0]
                    size -= text.end_lineno - text.lineno + 1
                if size > MAX_FUNCTION_LINES:
                    too_long[f"{name}.{node.name}"] = size

    assert too_long == {}


def test_module_docstrings_say_where_the_code_runs():
    assert [name for name, (_, tree) in _modules().items() if not _place(tree)] == []


def test_library_calls_neither_print_nor_eval_nor_reads_pickles():
    allowed = {
        "nbdist.__main__": {"print"},
        "nbdist.testing": {"pickle.loads"},  # of the test's own child processes, through a pipe
    }
    forbidden = {"print", "eval", "exec", "pickle.loads", "pickle.load", "os.system"}
    found = [
        f"{name}:{node.lineno} calls {called}"
        for name, (_, tree) in _modules().items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and (called := ast.unparse(node.func)) in forbidden
        and called not in allowed.get(name, ())
    ]

    assert found == []


def test_library_names_no_program_that_kills_by_name():
    words = re.compile(r"\b(pkill|killall|pgrep)\b")
    found = [
        f"{name}: {match.group()}"
        for name, (path, _) in _modules().items()
        for match in words.finditer(path.read_text(encoding="utf-8"))
    ]

    assert found == []


def test_source_of_the_package_is_ascii():
    assert [name for name, (path, _) in _modules().items() if not path.read_bytes().isascii()] == []
