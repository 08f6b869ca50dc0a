"""Builds the package's library `_C` (schemas, CPU kernels) with ninja.

The library knows no Python: torch.ops.load_library loads it, and a C++ program does with dlopen. It uses PyTorch's
stable ABI, so one build serves every Python >= 3.10 and every torch >= 2.11. What the environment can say:

    CXX              the C++ compiler (default: c++, g++ or clang++, the first found)
    LINQUANT_FLAGS   more flags for compiling and linking, such as `-O0 -g` or `-fsanitize=address`
    MAX_JOBS         how many compilers run at once (default: ninja's own choice)
"""

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NoReturn

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent
BUILD = "build/ninja"
OLDEST_TORCH = (2, 11)


def fail(sentence: str) -> NoReturn:
    raise SystemExit(f"torch_linquant: {sentence}")


def find_torch() -> Path:
    try:
        import torch
    except ImportError:
        fail("building needs torch >= 2.11, but it is not installed. Install it and build with --no-build-isolation.")
    if tuple(int(part) for part in torch.__version__.split(".")[:2]) < OLDEST_TORCH:
        fail(f"building needs torch >= 2.11, but got torch {torch.__version__}.")
    return Path(torch.__file__).resolve().parent


def find_compiler() -> str:
    names = [os.environ["CXX"]] if os.environ.get("CXX") else ["c++", "g++", "clang++"]
    for name in names:
        if shutil.which(name.split()[0]):
            return name
    fail(f"building needs a C++20 compiler, but found no {' or '.join(names)}. Install g++ or clang++, or set CXX.")


def find_ninja() -> str:
    # A venv's scripts are not on PATH unless it is activated.
    found = shutil.which("ninja") or shutil.which("ninja", path=os.path.dirname(sys.executable))
    return found or fail("building needs ninja, but it is not installed. Install it with pip install ninja.")


def quote(path: Path) -> str:
    return shlex.quote(str(path)).replace("$", "$$")


def ninja_file(torch: Path, compiler: str, libraries: list[Extension]) -> str:
    """The text of build.ninja, for ninja running in ROOT."""
    flags = [
        "-std=c++20 -O3 -fPIC -fvisibility=hidden -Wall -Wextra -Wno-unused-parameter",
        # IEEE arithmetic: no contraction to FMA, no option that changes a value. The last two change none.
        "-ffp-contract=off -fno-trapping-math -fno-math-errno",
        # The oldest torch whose stable ABI is used: major and minor in the two highest bytes.
        "-DTORCH_TARGET_VERSION=0x{:02x}{:02x}000000000000".format(*OLDEST_TORCH),
        # Torch's headers are system headers: their warnings are not ours.
        f"-Icsrc -isystem {quote(torch / 'include')}",
        "$more",
    ]
    lines = [
        f"builddir = {BUILD}",
        f"more = {os.environ.get('LINQUANT_FLAGS', '')}",
        f"flags = {' '.join(flags)}",
        # Only libtorch_cpu: a C++ program can then dlopen the library with no other part of torch loaded.
        f"ldflags = -shared -Wl,-z,defs -L{quote(torch / 'lib')} -ltorch_cpu $more",
        "rule compile",
        f"  command = {compiler} $flags -MMD -MF $out.d -c $in -o $out",
        "  description = Compiling $in",
        "  depfile = $out.d",
        "  deps = gcc",
        "rule link",
        f"  command = {compiler} $in $ldflags -o $out",
        "  description = Linking $out",
    ]
    for library in libraries:
        objects = {f"{BUILD}/{source}.o": source for source in library.sources}
        lines += [f"build {name}: compile {source}" for name, source in objects.items()]
        lines.append(f"build {built(library)}: link {' '.join(objects)}")
    return "\n".join(lines) + "\n"


def built(library: Extension) -> str:
    return f"{BUILD}/{library.name.rpartition('.')[2]}.so"


class BuildLibraries(build_ext):
    """Writes one build.ninja and runs it; setuptools only says where the results go."""

    def get_ext_filename(self, fullname: str) -> str:
        return fullname.replace(".", "/") + ".so"  # no Python's ABI in the name

    def run(self) -> None:
        (ROOT / BUILD).mkdir(parents=True, exist_ok=True)
        (ROOT / BUILD / "build.ninja").write_text(ninja_file(find_torch(), find_compiler(), self.extensions))
        jobs = ["-j", os.environ["MAX_JOBS"]] if os.environ.get("MAX_JOBS") else []
        if subprocess.call([find_ninja(), "-f", f"{BUILD}/build.ninja", *jobs], cwd=ROOT):
            fail("the C++ code was not built; the compiler's message stands above.")
        for library in self.extensions:
            target = Path(self.get_ext_fullpath(library.name))
            target.parent.mkdir(parents=True, exist_ok=True)
            # Replaced, not written into: a process may have it loaded.
            shutil.copyfile(ROOT / built(library), f"{target}.new")
            os.replace(f"{target}.new", target)


def files(*patterns: str) -> list[str]:
    return sorted(path.relative_to(ROOT).as_posix() for pattern in patterns for path in ROOT.glob(pattern))


if __name__ == "__main__":
    setup(
        ext_modules=[
            Extension(
                "torch_linquant._C",
                files("csrc/*.cpp", "csrc/cpu/*.cpp"),
                depends=files("csrc/*.h", "csrc/core/*.h", "csrc/cpu/*.h", "csrc/cpu/*.inc"),
                py_limited_api=True,
            )
        ],
        cmdclass={"build_ext": BuildLibraries},
        options={"bdist_wheel": {"py_limited_api": "cp310"}},
    )
