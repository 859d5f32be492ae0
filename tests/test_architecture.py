"""The house rules that are enforced, read from the syntax trees of src/windlass; nothing is imported.

1. Imports point down the rows, never sideways.
2. Packages without torch stay without it.
3. Family words appear only in families/.
4. Every package has a place in the table.
5. Files hold one thing, folders hold few files.
6. Inside a package too, imports point one way: no cycle between its files and sub-packages, however late an import is.
"""

from __future__ import annotations

import ast
import gc
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

pytestmark = pytest.mark.pure

SRC = Path(__file__).parents[1] / "src"
FAMILIES = SRC / "windlass" / "model" / "families"

FLOORS: dict[str, tuple[tuple[str, ...], ...]] = {
    "model": (("families", "formats", "text", "bundled"),),
    "runtime": (("machine", "parallel", "kernels"), ("quant",), ("weights",), ("nn", "offload"), ("engine",), ("fleet",)),
    "tasks": (("plan", "convert", "launch", "check", "bench", "serve", "evaluate", "route", "train", "observe"),),
}
"""Folders of packages, and their rows."""
# Lowest first. A package imports itself and the rows below its own.
ROWS: tuple[tuple[str, ...], ...] = (
    ("foreign",),
    ("errors",),
    ("units",),
    ("core",),
    *FLOORS["model"],
    ("wire",),
    *FLOORS["runtime"],
    *FLOORS["tasks"],
    ("open",),  # names to models, Launch to Client: what cli and windlass.Client share
    ("cli", "client"),
    ("__main__",),
)
ROW = {package: row for row, packages in enumerate(ROWS) for package in packages}
FLOOR = {package: floor for floor, rows in FLOORS.items() for packages in rows for package in packages}

TORCH_FREE = frozenset(
    "foreign errors units core families bundled machine text wire plan launch check serve evaluate route observe open cli client"
    " __main__ __init__".split()
)
HEAVY = frozenset({"torch", "numpy", "transformers", "triton", "deepspeed", "vllm"})
"""Never in a torch-free package; in EDGES only inside a function."""
NUMPY = frozenset({"route"})
"""Torch-free too, but fits regressions: numpy is all it needs."""
EDGES = frozenset({"open", "cli", "client"})
"""Where everything is wired together, as late as can be."""
LATE = frozenset({"matplotlib", "pynvml", "huggingface_hub", "pyarrow"})
"""Optional or slow: only inside a function, in whatever package."""

FAMILY_WORDS = frozenset(
    "glm chatglm llama codellama qwen mixtral mistral falcon bloom deepseek gpt2 gpt_oss neox bigcode starcoder evo2".split()
)
# Programs whose formats and speed we deal with; their names are not families.
PROGRAMS = re.compile(r"distributed[ _-]?llama|llama[._]cpp", re.IGNORECASE)

NO_LETTER = re.compile(r"[^A-Za-z0-9]+")

MAX_LINES = 500
"""Aim for 300; past 400 think about splitting."""
MAX_FILES = 14
"""Of sources in one folder; beyond that there is a sub-package to name."""
SOURCE_SUFFIXES = frozenset({".py", ".cpp", ".h", ".cu", ".cuh", ".js"})


@dataclass(frozen=True)
class Import:
    module: str
    line: int
    in_function: bool


@dataclass(frozen=True)
class Module:
    """A source file; `name` is dotted, `windlass.core.model`."""

    name: str
    source: str
    is_init: bool = False

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.source)

    @property
    def package(self) -> str:
        """Its place in the table: `core` of windlass.core.model, `plan` of windlass.tasks.plan.cost, `errors` of windlass.errors."""
        return _package([*self.name.split("."), "__init__"])


def _package(parts: list[str]) -> str:
    return parts[2] if parts[1] in FLOORS and len(parts) > 2 else parts[1]


def read_modules() -> list[Module]:
    found: list[Module] = []
    for path in sorted((SRC / "windlass").rglob("*.py")):
        parts = list(path.relative_to(SRC).with_suffix("").parts)
        is_init = parts[-1] == "__init__"
        found.append(Module(".".join(parts[:-1] if is_init else parts), path.read_text(), is_init))
    return found


MODULES = read_modules()


@pytest.fixture(scope="module", autouse=True)
def _trees() -> Iterator[None]:
    """While they are made nothing is garbage, and looking for it takes most of the time; afterwards nobody needs them."""
    gc.disable()
    yield
    for module in MODULES:
        module.__dict__.pop("tree", None)
    gc.enable()


# --- reading imports -------------------------------------------------------------------------------------------------


def _imported(node: ast.AST, module: Module) -> list[str]:
    match node:
        case ast.Import():
            return [alias.name for alias in node.names]
        case ast.ImportFrom(level=0):
            return [f"{node.module}.{alias.name}" for alias in node.names]
        case ast.ImportFrom():
            package = module.name.split(".") if module.is_init else module.name.split(".")[:-1]
            above = package[: len(package) - node.level + 1]
            return [".".join([*above, *([node.module] if node.module else []), alias.name]) for alias in node.names]
        case ast.Call(func=ast.Name(id="__import__" | "import_module") | ast.Attribute(attr="import_module"), args=[first, *_]):
            return [first.value] if isinstance(first, ast.Constant) and isinstance(first.value, str) else []
        case _:
            return []


IMPORTS = (ast.Import, ast.ImportFrom, ast.Call)
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)


@cache
def imports(module: Module) -> tuple[Import, ...]:
    found: list[Import] = []

    def visit(node: ast.AST, in_function: bool) -> None:
        if isinstance(node, IMPORTS):
            found.extend(Import(name, node.lineno, in_function) for name in _imported(node, module))
        # What only type checkers see is imported as late as can be: never.
        for_types = isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
        inside = in_function or for_types or isinstance(node, FUNCTIONS)
        for child in ast.iter_child_nodes(node) if in_expressions else _statements(node):
            visit(child, inside)

    # Expressions are most of what there is to visit, and few files import in one.
    in_expressions = "import_module" in module.source or "__import__" in module.source
    visit(module.tree, False)
    return tuple(found)


def _statements(node: ast.AST) -> list[ast.AST]:
    """Of those within it, the next ones, and what has them."""
    return [child for name in ("body", "handlers", "cases", "orelse", "finalbody") for child in _listed(node, name)]


def _listed(node: ast.AST, name: str) -> list[ast.AST]:
    found = getattr(node, name, None)
    return found if isinstance(found, list) else []


def _own_package(imported: str) -> str | None:
    """`plan` of windlass.tasks.plan.inference.search; None for other people's modules and for `windlass.__version__`."""
    parts = imported.split(".")
    if parts[0] != "windlass" or len(parts) == 1 or parts[1] == "__version__":
        return None
    return _package(parts)


# --- the rules -------------------------------------------------------------------------------------------------------


def upward_imports(module: Module) -> list[str]:
    problems: list[str] = []
    row = ROW.get(module.package, -1)  # windlass/__init__.py stands below everything
    for found in imports(module):
        target = _own_package(found.module)
        if module.is_init and module.package == "__init__" and target == "client" and found.in_function:
            continue  # the names that the package itself gives out, imported when they are first used
        if target is not None and target != module.package and ROW.get(target, len(ROWS)) >= row:
            problems.append(f"{module.name}:{found.line} imports {found.module}: {module.package} may not import {target}")
    return problems


def heavy_imports(module: Module) -> list[str]:
    problems: list[str] = []
    for found in imports(module):
        top, own = found.module.split(".")[0], _own_package(found.module)
        late_enough = found.in_function and module.package in EDGES
        if top in LATE and not found.in_function:
            problems.append(f"{module.name}:{found.line} imports {top} at the top; import it in the function that needs it")
        if module.package not in TORCH_FREE or late_enough:
            continue
        if top in HEAVY and not (top == "numpy" and module.package in NUMPY):
            problems.append(f"{module.name}:{found.line} imports {top}: {module.package} is torch-free")
        if own in ROW and own not in TORCH_FREE:
            problems.append(
                f"{module.name}:{found.line} imports {found.module}, which may import torch: {module.package} is torch-free"
            )
    return problems


def is_family(source: str) -> bool:
    """A family is a file that describes one: it has a `describe` function (families/ holds their tools too)."""
    return any(isinstance(node, ast.FunctionDef) and node.name == "describe" for node in ast.parse(source).body)


def family_words() -> frozenset[str]:
    files = [path for path in FAMILIES.glob("*.py") if path.stem != "__init__"]
    return FAMILY_WORDS | {path.stem for path in files if is_family(path.read_text())}


@cache
def words_in(text: str, words: frozenset[str]) -> list[str]:
    """Which of `words` the text names, whether as deepseek_v3, DeepSeekV3 or DeepSeek-V3: runs of its pieces are compared."""
    letters = NO_LETTER.sub("", text).lower()
    if not any(word.replace("_", "") in letters for word in words):  # nearly always, and found out sooner
        return []
    pieces = [piece.lower() for piece in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+", PROGRAMS.sub(" ", text))]
    runs = {"".join(pieces[first:stop]) for first in range(len(pieces)) for stop in range(first + 1, first + 5)}
    return sorted(word for word in words if word.replace("_", "") in runs)


def _names_and_strings(node: ast.AST) -> list[str]:
    match node:
        case ast.Name(id=name) | ast.Attribute(attr=name) | ast.arg(arg=name):
            return [name]
        case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
            return [name]
        case ast.alias():
            return [node.name, node.asname or ""]
        case ast.keyword(arg=str(name)):
            return [name]
        case ast.ImportFrom(module=str(name)):
            return [name]
        case ast.Constant(value=str(text)):
            return [text]
        case _:
            return []


def _may_name_families(node: ast.AST, module: Module) -> bool:
    """Docstrings may; so may the command line's examples, which are kept in one constant."""
    match node:
        case ast.Expr(value=ast.Constant()):
            return True
        case ast.Assign(targets=[ast.Name(id="EXAMPLES")]) | ast.AnnAssign(target=ast.Name(id="EXAMPLES")):
            return module.package == "cli"
        case _:
            return False


def family_mentions(module: Module, words: frozenset[str]) -> list[str]:
    if module.package == "families":
        return []

    found = [f"{module.name} is named after {word!r}" for word in words_in(module.name, words)]

    def visit(node: ast.AST, line: int) -> None:
        if _may_name_families(node, module):
            return
        line = getattr(node, "lineno", line)
        for text in _names_and_strings(node):
            found.extend(
                f"{module.name}:{line} says {word!r} in {text[:60]!r}; what belongs to one family stands in families/"
                for word in words_in(text, words)
            )
        for child in ast.iter_child_nodes(node):
            visit(child, line)

    visit(module.tree, 0)
    return found


def crowded(files: list[Path]) -> dict[str, int]:
    """Folders with too many sources, and how many they have. A package's `__init__.py` does not count."""
    counts = Counter(str(file.parent) for file in files if file.suffix in SOURCE_SUFFIXES and file.name != "__init__.py")
    return {folder: count for folder, count in counts.items() if count > MAX_FILES}


def _module_of(imported: str, names: frozenset[str]) -> str | None:
    """The module that an import reads: `windlass.tasks.plan.search.Question` is of windlass.tasks.plan.search."""
    while imported and imported not in names:
        imported = imported.rpartition(".")[0]
    return imported or None


def inner_imports(modules: list[Module]) -> Iterator[tuple[str, str, str]]:
    """(package, child, child it imports): children are the files and sub-packages of a package, at every depth."""
    names = frozenset(module.name for module in modules)
    for module in modules:
        for found in imports(module):
            target = _module_of(found.module, names) if found.module.startswith("windlass.") else None
            if target is None or target == module.name:
                continue
            source, aimed = module.name.split("."), target.split(".")
            depth = next((place for place, (one, other) in enumerate(zip(source, aimed, strict=False)) if one != other), None)
            if depth is not None and depth > 1:  # within one package; rows are checked elsewhere
                yield ".".join(source[:depth]), source[depth], aimed[depth]


def inner_cycles(modules: list[Module]) -> list[str]:
    graphs: dict[str, dict[str, set[str]]] = {}
    for package, child, other in inner_imports(modules):
        graphs.setdefault(package, {}).setdefault(child, set()).add(other)
    problems: list[str] = []
    for package, graph in sorted(graphs.items()):
        try:
            TopologicalSorter(graph).prepare()
        except CycleError as error:
            problems.append(f"{package}: {' -> '.join(reversed(error.args[1]))}")
    return problems


def misplaced(names: set[str]) -> list[str]:
    return [
        f"windlass.{name} is in no row; give it one in ROWS and in docs/architecture.md" for name in sorted(names - ROW.keys())
    ]


def misfloored(modules: list[Module]) -> list[str]:
    """Packages that are not on their floor."""
    homes = {(module.package, module.name.split(".")[1]) for module in modules if len(module.name.split(".")) > 2}
    return [f"{package} stands in {folder}/" for package, folder in sorted(homes) if FLOOR.get(package, package) != folder]


# --- the tests -------------------------------------------------------------------------------------------------------


def test_there_is_something_to_check() -> None:
    assert {"errors", "units", "core", "families", "plan"} <= {module.package for module in MODULES}


def test_imports_point_down() -> None:
    assert [problem for module in MODULES for problem in upward_imports(module)] == []


def test_torch_free_packages_import_no_torch() -> None:
    assert [problem for module in MODULES for problem in heavy_imports(module)] == []


def test_family_words_only_in_families() -> None:
    words = family_words()
    assert [problem for module in MODULES for problem in family_mentions(module, words)] == []


def test_every_package_has_a_row() -> None:
    assert misplaced({module.package for module in MODULES} - {"__init__", *FLOORS}) == []


def test_every_package_is_on_its_floor() -> None:
    assert misfloored(MODULES) == []
    assert misfloored([Module("windlass.tasks.nn.decoder", ""), Module("windlass.plan.cost", "")]) != []


def test_a_floor_holds_nothing_but_packages() -> None:
    """And its `__init__` says what lives there, and imports nothing."""
    for floor in FLOORS:
        (module,) = [module for module in MODULES if module.name == f"windlass.{floor}"]
        assert [file.name for file in (SRC / "windlass" / floor).iterdir() if file.is_file()] == ["__init__.py"]
        assert ast.get_docstring(module.tree) and len(module.tree.body) == 1


def test_files_hold_one_thing() -> None:
    long = {module.name: num_lines for module in MODULES if (num_lines := module.source.count("\n")) > MAX_LINES}
    assert long == {}, f"over {MAX_LINES} lines"


def test_folders_hold_few_files() -> None:
    assert crowded(list((SRC / "windlass").rglob("*"))) == {}, f"over {MAX_FILES} files; name a sub-package"


def test_imports_within_a_package_point_one_way() -> None:
    assert inner_cycles(MODULES) == []


def test_no_package_stands_in_two_rows() -> None:
    assert len(ROW) == sum(map(len, ROWS))
    assert ROW.keys() >= TORCH_FREE - {"__init__"}


# --- the checks can fail ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "source"),
    [
        ("windlass.core.model", "from windlass.tasks.plan import search"),
        ("windlass.core.model", "import windlass.model.families.reading.rope"),
        ("windlass.core.model", "from windlass import cli"),
        ("windlass.core.model", "from ..engine import scheduler"),
        ("windlass.core.model", "def f():\n    from windlass.runtime.nn import decoder"),
        ("windlass.core.model", "from importlib import import_module\nimport_module('windlass.runtime.nn.decoder')"),
        ("windlass.core.model", "from windlass.unheard_of import thing"),
        ("windlass.model.families.one", "from windlass.runtime.machine import probe"),
        ("windlass.tasks.plan.inference.search", "from windlass.tasks.serve import app"),
        ("windlass.errors", "from windlass.units import GIB"),
        ("windlass", "from windlass.core import model"),
        ("windlass", "from windlass import client"),
        ("windlass.cli.run", "def f():\n    from windlass.client import Client"),
    ],
)
def test_an_import_that_does_not_point_down_is_caught(name: str, source: str) -> None:
    assert len(upward_imports(Module(name, source))) == 1


@pytest.mark.parametrize(
    ("name", "source"),
    [
        (
            "windlass.tasks.plan.inference.search",
            "from windlass.tasks.plan import memory\nfrom windlass.core.model import MoE\nfrom windlass import __version__",
        ),
        ("windlass.tasks.plan.inference.search", "from .memory import weights\nimport msgspec"),
        ("windlass.cli.main", "def f():\n    from windlass.tasks.serve import app"),
        ("windlass.client", "def f():\n    from windlass.open import resolve"),
        ("windlass.units", "from windlass.errors import BadInput"),
    ],
)
def test_an_import_that_points_down_passes(name: str, source: str) -> None:
    assert upward_imports(Module(name, source)) == []


@pytest.mark.parametrize(("name", "num_problems"), [("client", 0), ("cli", 1)])
def test_only_the_client_is_given_out_by_the_package_and_late(name: str, num_problems: int) -> None:
    source = f"def __getattr__(name):\n    from windlass import {name}"
    assert len(upward_imports(Module("windlass", source, is_init=True))) == num_problems


def test_relative_imports_of_a_package_itself_are_resolved() -> None:
    assert [found.module for found in imports(Module("windlass.core", "from .model import MoE", is_init=True))] == [
        "windlass.core.model.MoE"
    ]


@pytest.mark.parametrize(
    ("name", "source"),
    [
        ("windlass.core.model", "import torch"),
        ("windlass.core.model", "def f():\n    import torch.nn as nn"),
        ("windlass.tasks.plan.inference.search", "from numpy import array"),
        ("windlass.tasks.plan.inference.search", "def f():\n    from windlass.runtime.nn import decoder"),
        ("windlass.cli.main", "import torch"),
        ("windlass.cli.main", "from windlass.runtime.engine import engine"),
        ("windlass.runtime.machine.probe", "import pynvml"),
        ("windlass.model.formats.hub", "import huggingface_hub"),
    ],
)
def test_a_heavy_import_is_caught(name: str, source: str) -> None:
    assert len(heavy_imports(Module(name, source))) == 1


@pytest.mark.parametrize(
    ("name", "source"),
    [
        ("windlass.runtime.nn.decoder", "import torch"),
        ("windlass.cli.main", "def f():\n    import torch\n    from windlass.runtime.engine import engine"),
        ("windlass.runtime.machine.probe", "def f():\n    import pynvml"),
    ],
)
def test_a_heavy_import_in_its_place_passes(name: str, source: str) -> None:
    assert heavy_imports(Module(name, source)) == []


@pytest.mark.parametrize(
    ("name", "source"),
    [
        ("windlass.runtime.nn.decoder", "is_glm = True"),
        ("windlass.runtime.nn.decoder", "def load_llama(): ..."),
        ("windlass.runtime.nn.decoder", "class DeepSeekMixer: ..."),
        ("windlass.runtime.nn.decoder", "x = spec.family == 'gpt-oss'"),
        ("windlass.runtime.nn.decoder", "x = f'a {y} GPTNeoX model'"),
        ("windlass.runtime.nn.decoder", "f(qwen3=1)"),
        ("windlass.runtime.nn.decoder", "EXAMPLES = 'plan GLM-4.5-Air'"),
        ("windlass.runtime.nn.llama", "x = 1"),
        ("windlass.cli.main", "HELP = 'plan GLM-4.5-Air'"),
    ],
)
def test_a_family_word_is_caught(name: str, source: str) -> None:
    assert len(family_mentions(Module(name, source), FAMILY_WORDS)) == 1


@pytest.mark.parametrize(
    ("name", "source"),
    [
        ("windlass.model.families.one", "is_glm = True"),
        ("windlass.runtime.nn.decoder", '"""Runs GLM."""\nx: int = 1\n"""As in Llama."""  # and Qwen'),
        ("windlass.cli.main", "EXAMPLES = 'plan GLM-4.5-Air'"),
        ("windlass.model.formats.distributed_llama", "x = 'Distributed Llama file'"),
        ("windlass.runtime.nn.decoder", "engine = 'vllm' if blooming else ''"),
    ],
)
def test_what_is_no_family_word_passes(name: str, source: str) -> None:
    assert family_mentions(Module(name, source), FAMILY_WORDS) == []


def test_a_family_is_a_file_that_describes_one() -> None:
    assert is_family("def describe(config): ...")
    assert not is_family("def rotate(config): ...")


@pytest.mark.parametrize(
    "late",
    [
        "from windlass.runtime.engine.ranks import first",
        "def f():\n    from windlass.runtime.engine.ranks.first import load_job",
        "if TYPE_CHECKING:\n    from windlass.runtime.engine.ranks import first",
    ],
)
def test_a_cycle_between_a_file_and_a_sub_package_is_caught(late: str) -> None:
    modules = [
        Module("windlass.runtime.engine", "", is_init=True),
        Module("windlass.runtime.engine.ranks", "", is_init=True),
        Module("windlass.runtime.engine.load", late),
        Module("windlass.runtime.engine.ranks.first", "from windlass.runtime.engine.load import load_model"),
    ]
    assert len(inner_cycles(modules)) == 1


def test_a_sub_package_that_imports_down_passes() -> None:
    modules = [
        Module(
            "windlass.runtime.engine.load",
            "from windlass.runtime.engine.memory import limits_for\nfrom windlass.core.model import MoE",
        ),
        Module("windlass.runtime.engine.memory", "import windlass.core.model"),
        Module("windlass.runtime.engine.ranks.first", "from windlass.runtime.engine.load import load_model"),
    ]
    assert inner_cycles(modules) == []


def test_a_crowded_folder_is_caught() -> None:
    files = [Path("kernels") / f"{name}.{suffix}" for name in "abcdefgh" for suffix in ("py", "cpp")]
    assert crowded([*files, Path("runtime/kernels/__init__.py"), Path("kernels/notes.toml")]) == {"kernels": 16}
    assert crowded(files[:MAX_FILES]) == {}


def test_an_unplaced_package_is_caught() -> None:
    assert len(misplaced({"core", "utils"})) == 1
