"""The package as it is built, installed and loaded."""

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[1]
LIBRARY = ROOT / "torch_linquant" / "_C.so"
TORCH_LIB = Path(torch.__file__).parent / "lib"

# One worker makes the wheel once.
pytestmark = pytest.mark.xdist_group("package")


def run(*command, cwd="/", **environment):
    """Runs a command, away from the sources unless told; `environment` is added to the present one."""
    env = {**os.environ, **{name: str(value) for name, value in environment.items()}}
    return subprocess.run([str(part) for part in command], cwd=cwd, env=env, capture_output=True, text=True)


def copy_sources(to: Path) -> Path:
    """The sources without what was built in place; objects are taken along, so that nothing compiles twice."""
    shutil.copytree(ROOT / "csrc", to / "csrc")
    shutil.copytree(
        ROOT / "torch_linquant", to / "torch_linquant", ignore=shutil.ignore_patterns("*.so", "__pycache__")
    )
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy2(ROOT / name, to)
    if (ROOT / "build" / "ninja").is_dir():
        shutil.copytree(ROOT / "build" / "ninja", to / "build" / "ninja")
    return to


# --- the wheel


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    sources, out = copy_sources(tmp_path_factory.mktemp("sources")), tmp_path_factory.mktemp("wheel")
    made = run(sys.executable, "-m", "pip", "wheel", "--no-build-isolation", "--no-deps", "-w", out, sources)
    assert made.returncode == 0, made.stdout + made.stderr
    [path] = out.iterdir()
    return path


def test_wheel_serves_every_python_from_3_10(wheel):
    assert re.fullmatch(r"torch_linquant-[\d.]+-cp310-abi3-(linux|macosx|win)\w*\.whl", wheel.name)


def test_wheel_holds_the_package_alone(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    package = {name for name in names if name.startswith("torch_linquant/")}
    modules = {f"torch_linquant/{path.name}" for path in (ROOT / "torch_linquant").glob("*.py")}
    assert package == modules | {"torch_linquant/_C.so", "torch_linquant/py.typed"}
    assert all(re.match(r"torch_linquant-[\d.]+\.dist-info/", name) for name in names - package)
    assert any(name.endswith("/LICENSE") for name in names)


def test_wheel_needs_torch_alone(wheel):
    archive = zipfile.ZipFile(wheel)
    [metadata] = [name for name in archive.namelist() if name.endswith("/METADATA")]
    lines = archive.read(metadata).decode().splitlines()
    needs = [line for line in lines if line.startswith("Requires-Dist:") and "extra ==" not in line]
    assert needs == ["Requires-Dist: torch>=2.11"]
    assert "Requires-Python: >=3.10" in lines


def test_installed_wheel_works(wheel, tmp_path):
    install = run(sys.executable, "-m", "pip", "install", "--no-deps", "--target", tmp_path, wheel)
    assert install.returncode == 0, install.stdout + install.stderr
    program = """if True:
        import torch, torch_linquant
        print(torch_linquant.__file__)
        print(torch_linquant.quantize_linear(torch.tensor([-1.0, 0.6]), torch.tensor(0.5), dtype=torch.int8).tolist())
    """
    done = run(sys.executable, "-c", program, PYTHONPATH=tmp_path)
    assert done.stdout.splitlines() == [str(tmp_path / "torch_linquant" / "__init__.py"), "[-2, 1]"], done.stderr


def test_source_archive_builds(tmp_path):
    sources = copy_sources(tmp_path)
    made = run(sys.executable, "setup.py", "-q", "sdist", "-d", "dist", "--formats", "zip", cwd=sources)
    assert made.returncode == 0, made.stderr
    [archive] = (sources / "dist").iterdir()
    names = {name.partition("/")[2] for name in zipfile.ZipFile(archive).namelist()}
    csrc = {path.relative_to(ROOT).as_posix() for path in (ROOT / "csrc").glob("**/*") if path.is_file()}
    assert names >= csrc | {"setup.py", "pyproject.toml", "README.md", "LICENSE", "torch_linquant/py.typed"}


# --- what stops a build: one sentence each


@pytest.fixture
def setup_py():
    spec = importlib.util.spec_from_file_location("linquant_setup", ROOT / "setup.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_build_without_torch(setup_py, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)  # importing it raises ImportError
    with pytest.raises(SystemExit) as stop:
        setup_py.find_torch()
    assert str(stop.value) == (
        "torch_linquant: building needs torch >= 2.11, but it is not installed. "
        "Install it and build with --no-build-isolation."
    )


@pytest.mark.parametrize("version", ["2.10.0", "2.9.1+cu128", "1.13.1"])
def test_build_with_an_older_torch(setup_py, monkeypatch, version):
    monkeypatch.setattr(torch, "__version__", version)
    with pytest.raises(SystemExit) as stop:
        setup_py.find_torch()
    assert str(stop.value) == f"torch_linquant: building needs torch >= 2.11, but got torch {version}."


@pytest.mark.parametrize("version", ["2.11.0", "2.13.0+cpu", "2.14.0a0+git1234567", "3.0.0"])
def test_build_with_a_newer_torch(setup_py, monkeypatch, version):
    monkeypatch.setattr(torch, "__version__", version)
    assert setup_py.find_torch() == TORCH_LIB.parent


@pytest.mark.parametrize(
    ("cxx", "named"), [("", "c++ or g++ or clang++"), ("no-such-compiler -m64", "no-such-compiler -m64")]
)
def test_build_without_a_compiler(setup_py, monkeypatch, cxx, named):
    monkeypatch.setenv("CXX", cxx)
    monkeypatch.setenv("PATH", "")
    with pytest.raises(SystemExit) as stop:
        setup_py.find_compiler()
    assert str(stop.value) == (
        f"torch_linquant: building needs a C++20 compiler, but found no {named}. Install g++ or clang++, or set CXX."
    )


def test_build_without_ninja(setup_py, monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name, path=None: None)
    with pytest.raises(SystemExit) as stop:
        setup_py.find_ninja()
    assert str(stop.value) == (
        "torch_linquant: building needs ninja, but it is not installed. Install it with pip install ninja."
    )


def test_the_sentence_is_the_last_line(tmp_path):
    sources = copy_sources(tmp_path)
    stopped = run(sys.executable, "setup.py", "-q", "build_ext", "--inplace", cwd=sources, CXX="no-such-compiler")
    assert stopped.returncode == 1
    assert stopped.stderr.splitlines()[-1].startswith(
        "torch_linquant: building needs a C++20 compiler, but found no no-"
    )
    assert not (sources / "torch_linquant" / "_C.so").exists()


def test_code_that_does_not_compile(tmp_path):
    sources = copy_sources(tmp_path)
    shutil.rmtree(sources / "csrc")
    (sources / "csrc").mkdir()
    (sources / "csrc" / "planted.cpp").write_text("#error planted\n")
    stopped = run(sys.executable, "setup.py", "-q", "build_ext", "--inplace", cwd=sources)
    assert stopped.returncode == 1
    assert "#error planted" in stopped.stdout
    assert stopped.stderr.splitlines() == [
        "torch_linquant: the C++ code was not built; the compiler's message stands above."
    ]


# --- what stops an import: one sentence each


def test_import_without_the_library(tmp_path):
    sources = copy_sources(tmp_path)
    stopped = run(sys.executable, "-c", "import torch_linquant", cwd=sources)
    assert stopped.returncode == 1
    assert re.match("ImportError: torch_linquant.*_C.so", stopped.stderr.splitlines()[-1])


def test_import_with_an_older_torch():
    program = "import torch; torch.__version__ = '2.10.0'; import torch_linquant"
    stopped = run(sys.executable, "-c", program, PYTHONPATH=ROOT)
    assert stopped.returncode == 1
    assert re.match(r"ImportError: torch_linquant.*torch >= 2\.11.*2\.10\.0", stopped.stderr.splitlines()[-1])


# --- the library, for programs without Python


@pytest.mark.skipif(not shutil.which("readelf"), reason="needs readelf")
def test_library_needs_libtorch_cpu_alone():
    listed = run("readelf", "--dynamic", LIBRARY).stdout
    needed = set(re.findall(r"\(NEEDED\).*\[(.+?)\]", listed))
    system = {
        name for name in needed if re.match(r"(libstdc\+\+|libgcc_s|libm|libc|libdl|libpthread|ld-linux\S*)\.so", name)
    }
    assert needed - system == {"libtorch_cpu.so"}
    assert "RPATH" not in listed and "RUNPATH" not in listed


@pytest.mark.skipif(not shutil.which("c++"), reason="needs a C++ compiler")
def test_cpp_program_loads_the_library(tmp_path):
    source, program = tmp_path / "load.cpp", tmp_path / "load"
    source.write_text(r"""
        #include <dlfcn.h>
        #include <cstdio>
        int main(int, char** argv) {
          for (int i = 1; i < 3; ++i)
            if (!dlopen(argv[i], RTLD_NOW | RTLD_GLOBAL)) return std::puts(dlerror()), 1;
          if (dlopen("libtorch_python.so", RTLD_NOW | RTLD_NOLOAD)) return std::puts("Python's part is loaded"), 1;
          return std::puts("loaded"), 0;
        }
    """)
    compiled = run("c++", source, "-o", program, "-ldl")
    assert compiled.returncode == 0, compiled.stderr
    done = run(program, TORCH_LIB / "libtorch_cpu.so", LIBRARY)
    assert done.stdout == "loaded\n", done.stderr
