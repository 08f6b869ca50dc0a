"""AOTInductor: a compiled model runs from Python, and from C++ without Python, with the bits of eager."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "examples" / "cpp"))

pytestmark = pytest.mark.xdist_group("aoti")


def test_from_python(tmp_path):
    from compile_model import Codes

    model = Codes().eval()
    program = torch.export.export(model, (torch.randn(5, 12),), dynamic_shapes=({0: torch.export.Dim("rows")},))
    file = torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "model.pt2"))
    run = torch._inductor.aoti_load_package(file)
    with torch.no_grad():
        for rows in (1, 6, 40):
            x = torch.randn(rows, 12) * 3
            # The float product of one row is a matrix-vector product, which Inductor may write itself.
            got, want = run(x), model(x)
            assert torch.equal(got, want) if rows > 1 else (got - want).abs().max() < 0.1


def test_the_readmes_commands(tmp_path):
    """Word for word, but for the folders."""
    if not shutil.which("g++"):
        pytest.skip("no g++ on this machine")
    text = (ROOT / "examples" / "cpp" / "README.md").read_text()
    (commands,) = re.findall(r"```\n(.*?)```", text, re.S)
    commands = commands.replace(".venv/bin/python", sys.executable).replace("build/", f"{tmp_path}/")
    commands = commands.replace("torch_linquant/_C.so", str(ROOT / "torch_linquant" / "_C.so"))
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    run = subprocess.run(
        ["bash", "-ec", commands], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600
    )
    assert "equal, byte for byte" in run.stdout, run.stdout + run.stderr
    # What goes wrong is said.
    binary = tmp_path / "run"
    for arguments, sentence in (
        ([], "usage: run LIBRARY"),
        (["/no/library.so", "m", "1", "1"], "/no/library.so"),
        (
            [str(ROOT / "torch_linquant" / "_C.so"), str(tmp_path / "model.pt2"), "5", "12"],
            "must hold 60 float32 numbers",
        ),
    ):
        bad = subprocess.run(
            [binary, *arguments], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=120
        )
        assert bad.returncode == 1 and sentence in bad.stderr
