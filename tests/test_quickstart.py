"""examples/quickstart.py, run as its readers run it."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import torch_linquant

for needed in ("rich", "sklearn"):
    pytest.importorskip(needed)

SCRIPT = Path(__file__).parents[1] / "examples" / "quickstart.py"


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    out = tmp_path_factory.mktemp("quickstart")
    package = str(Path(torch_linquant.__file__).parents[1])
    env = {**os.environ, "COLUMNS": "80", "PYTHONPATH": package, "PYTHONIOENCODING": "utf-8"}
    result = subprocess.run(
        [sys.executable, SCRIPT, "--epochs", "2", "--out", out / "new"],
        capture_output=True,
        text=True,
        encoding="utf-8",
        env=env,
        timeout=300,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return out / "new", result.stdout


def test_says_what_was_compared(run):
    _, text = run
    assert "Reloaded        bit-equal to the eager model" in text
    assert "Exported graph  5 quantize_linear, 10 dequantize_linear; any batch size" in text
    assert "2/2" in text and "22/22" in text
    codes = re.search(r"codes equal to ONNX Runtime: ([\d,]+) of ([\d,]+)", text)
    assert codes is None or codes[1] == codes[2]
    assert codes or "not installed" in text


def test_accuracy_and_size(run):
    _, text = run
    before, after = map(float, re.search(r"Accuracy\D+([\d.]+) %\D+([\d.]+) %", text).groups())
    assert before > 60 and abs(before - after) < 3
    ratio = float(re.search(r"([\d.]+) times smaller", text)[1])
    assert 3.5 < ratio < 4
    decibels = [float(value) for value in re.findall(r"([\d.]+) dB", text)]
    assert len(decibels) == 5 and all(25 < value < 70 for value in decibels)


def test_fits_80_columns(run):
    out, text = run
    assert all(len(line) <= 80 for line in text.splitlines() if str(out) not in line)
    assert "\x1b" not in text


def test_leaves_a_program_that_runs(run):
    out, _ = run
    program = torch.export.load(out / "quickstart.pt2").module()
    assert program(torch.rand(3, 1, 8, 8)).shape == (3, 10)


@pytest.fixture
def quickstart():
    spec = importlib.util.spec_from_file_location("quickstart", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_exit_code_tells_a_difference(quickstart, tmp_path, monkeypatch, capsys):
    arguments = ["--epochs", "1", "--out", str(tmp_path)]
    export = quickstart.export

    def broken(model, x, path):
        program = export(model, x, path)
        program.state_dict["conv1.bias"][0] += 1
        return program

    with monkeypatch.context() as patch:
        patch.setattr(quickstart, "export", broken)
        assert quickstart.main(arguments) == 1
        assert "NOT equal" in capsys.readouterr().out
    monkeypatch.setattr(quickstart, "compare_codes", lambda model, x: (1, 2))
    assert quickstart.main(arguments) == 1
    monkeypatch.setattr(quickstart, "compare_codes", lambda model, x: None)
    assert quickstart.main(arguments) == 0
