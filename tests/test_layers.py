"""A file imports or includes only what stands below it: the order that architecture is, read from the sources."""

import ast
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

# Python modules of the package, lowest first: each may import those before it. A new module gets its place here.
MODULES = [
    "dtypes",
    "granularity",
    "_library",
    "_inductor",
    "_fake",
    "_sharding",
    "_autograd",
    "decompositions",
    "ops",
    "qparams",
    "weights",
    "histogram",
]
MODULES += ["observers", "histogram_observers", "fake_quantize", "sync", "modules", "workflow"]
FOREIGN = {"torch"} | sys.stdlib_module_names  # all that the package may need to run

# Parts of csrc, by the start of the path, and what each may include.
STABLE_ABI = ("torch/csrc/stable/", "torch/headeronly/", "torch/csrc/inductor/aoti_torch/c/")
PARTS = {
    "core/": ("core/",),
    "schema.cpp": STABLE_ABI,
    "plan.": ("core/", "plan.h", *STABLE_ABI),
    "cpu/": ("core/", "plan.h", "cpu/", *STABLE_ABI),
    "cuda/": ("core/", "plan.h", "cuda/", *STABLE_ABI),
}


def import_faults(package: Path) -> list[str]:
    """One line for each import that the order forbids."""
    found = []
    for file in sorted(package.glob("**/*.py")):
        name = file.relative_to(package).with_suffix("").as_posix()
        tree = ast.parse(file.read_text())
        if name == "__init__":
            found += [
                f"__init__.py:{node.lineno}: holds more than re-exports" for node in tree.body if not reexport(node)
            ]
        elif name not in MODULES:
            found.append(f"{name}.py: has no place in MODULES")
            continue
        below = MODULES if name == "__init__" else MODULES[: MODULES.index(name)]
        for line, target in imported(tree):
            top, _, rest = target.partition(".")
            good = rest.partition(".")[0] in below if top == "torch_linquant" else top in FOREIGN
            if not good:
                found.append(f"{name}.py:{line}: imports {target}")
    return found


def imported(tree: ast.AST) -> list[tuple[int, str]]:
    """Line and absolute name of everything that is imported anywhere in the file, the package's own modules as such."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            module = ".".join(filter(None, ["torch_linquant" if node.level else "", node.module]))
            whole = module == "torch_linquant"  # the names are modules then
            found += [(node.lineno, f"{module}.{alias.name}" if whole else module) for alias in node.names]
    return found


def reexport(node: ast.stmt) -> bool:
    """A docstring, an import from within the package, or __all__."""
    if isinstance(node, ast.Expr):
        return isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
    if isinstance(node, ast.Assign):
        return [target.id for target in node.targets if isinstance(target, ast.Name)] == ["__all__"]
    return isinstance(node, ast.ImportFrom) and node.level == 1


def include_faults(csrc: Path) -> list[str]:
    """One line for each include that the order forbids."""
    found = []
    for file in sorted(path for path in csrc.glob("**/*") if path.is_file()):
        name = file.relative_to(csrc).as_posix()
        allowed = next((allowed for part, allowed in PARTS.items() if name.startswith(part)), None)
        if allowed is None:
            found.append(f"{name}: has no place in PARTS")
            continue
        for number, line in enumerate(file.read_text().splitlines(), 1):
            include = re.match(r'\s*#\s*include\s*([<"])(.+?)[>"]', line)
            if not include:
                continue
            bracket, target = include.groups()
            # The compiler's and CUDA's own headers have no folder: <vector>, <immintrin.h>, <cuda_runtime.h>.
            system = bracket == "<" and "/" not in target and target != "Python.h"
            if not (system or target.startswith(allowed)):
                found.append(f"{name}:{number}: includes {target}")
            elif bracket == '"' and not (csrc / target).is_file():
                found.append(f"{name}:{number}: {target} is no path from csrc/")
    return found


def test_imports():
    assert import_faults(ROOT / "torch_linquant") == []


def test_includes():
    assert include_faults(ROOT / "csrc") == []


def test_modules_exist():
    missing = [name for name in MODULES if not (ROOT / "torch_linquant" / f"{name}.py").is_file()]
    assert missing == []


@pytest.mark.parametrize(
    ("file", "text", "fault"),
    [
        ("dtypes.py", "import torch\nfrom .ops import pack", "dtypes.py:2: imports torch_linquant.ops"),
        ("ops.py", "def f():\n    from . import qparams", "ops.py:2: imports torch_linquant.qparams"),
        ("ops.py", "from torch_linquant.workflow import prepare", "ops.py:1: imports torch_linquant.workflow"),
        ("ops.py", "import torch_linquant", "ops.py:1: imports torch_linquant"),
        ("ops.py", "import os, numpy.linalg", "ops.py:1: imports numpy.linalg"),
        ("extra.py", "", "extra.py: has no place in MODULES"),
        ("sub/extra.py", "", "sub/extra.py: has no place in MODULES"),
        ("__init__.py", "from .ops import pack\nx = pack", "__init__.py:2: holds more than re-exports"),
        ("__init__.py", "import torch", "__init__.py:1: holds more than re-exports"),
        ("__init__.py", "def f(): ...", "__init__.py:1: holds more than re-exports"),
        ("__init__.py", "from .extra import f", "__init__.py:1: imports torch_linquant.extra"),
    ],
)
def test_finds_planted_imports(tmp_path, file, text, fault):
    (tmp_path / file).parent.mkdir(exist_ok=True)
    (tmp_path / file).write_text(text)
    assert import_faults(tmp_path) == [fault]


def test_lets_good_imports_pass(tmp_path):
    (tmp_path / "__init__.py").write_text('"""Text."""\n\nfrom .ops import pack\n\n__all__ = ["pack"]\n')
    (tmp_path / "ops.py").write_text("import math\n\nimport torch.nn.functional as F\n\nfrom . import _fake, dtypes\n")
    assert import_faults(tmp_path) == []


@pytest.mark.parametrize(
    ("file", "line", "fault"),
    [
        ("core/a.h", "#include <torch/csrc/stable/tensor.h>", "core/a.h:1: includes torch/csrc/stable/tensor.h"),
        ("core/a.h", '#include "plan.h"', "core/a.h:1: includes plan.h"),
        ("schema.cpp", '#include "cpu/b.h"', "schema.cpp:1: includes cpu/b.h"),
        ("plan.cpp", '#  include "cpu/b.h"', "plan.cpp:1: includes cpu/b.h"),
        ("plan.cpp", "#include <ATen/ATen.h>", "plan.cpp:1: includes ATen/ATen.h"),
        ("cpu/b.cpp", "#include <torch/library.h>", "cpu/b.cpp:1: includes torch/library.h"),
        ("cpu/b.cpp", "#include <Python.h>", "cpu/b.cpp:1: includes Python.h"),
        ("cpu/b.cpp", '#include "cuda/c.cuh"', "cpu/b.cpp:1: includes cuda/c.cuh"),
        ("cuda/c.cu", '#include "cpu/b.h"', "cuda/c.cu:1: includes cpu/b.h"),
        ("cuda/c.cu", '#include "b.h"', "cuda/c.cu:1: includes b.h"),
        ("cpu/b.cpp", '#include "cpu/gone.h"', "cpu/b.cpp:1: cpu/gone.h is no path from csrc/"),
        ("extra.cpp", "", "extra.cpp: has no place in PARTS"),
    ],
)
def test_finds_planted_includes(tmp_path, file, line, fault):
    (tmp_path / file).parent.mkdir(exist_ok=True)
    (tmp_path / file).write_text(line)
    assert include_faults(tmp_path) == [fault]
