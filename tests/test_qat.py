"""examples/qat.py, run as its readers run it."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

for needed in ("rich", "sklearn"):
    pytest.importorskip(needed)

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize("bits", [4, 2])
def test_trains_and_exports_to_the_bit(bits, tmp_path):
    environment = {**os.environ, "COLUMNS": "80", "PYTHONPATH": str(ROOT), "PYTHONIOENCODING": "utf-8"}
    script = ROOT / "examples" / "qat.py"
    command = [sys.executable, script, "--bits", str(bits), "--epochs", "4", "--qat-epochs", "3", "--out", tmp_path]
    run = subprocess.run(command, capture_output=True, text=True, encoding="utf-8", env=environment, timeout=300)
    assert run.returncode == 0, run.stdout + run.stderr
    text = run.stdout
    assert "Reloaded        bit-equal to the trained model" in text
    before, ptq, qat = map(float, re.findall(r"([\d.]+) % │", text))
    assert before > 80 and qat > before - 4 and qat >= ptq - 1
    assert float(re.search(r"moved by ([\d.]+) %", text)[1]) > 0.1
    assert all(len(line) <= 80 for line in text.splitlines() if str(tmp_path) not in line)
