"""What the repository may hold: small files that name no machine, no package index and no ticket."""

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LARGEST = 1_000_000  # bytes

# Written so that no pattern matches its own text.
FORBIDDEN = {
    "a path of one machine": r"(?<![\w.])/(work|home|root|Users)/\w",
    "a package index": r"\bpy(pi|thonhosted)\.org",
    "a ticket": r"\b[Ii]ssues? #?[0-9]",
}


def faults(files: list[Path]) -> list[str]:
    """One line for each thing that may not be."""
    found = []
    for file in files:
        data = file.read_bytes()
        if len(data) > LARGEST:
            found.append(f"{file}: {len(data)} bytes, more than {LARGEST}")
        for number, line in enumerate(data.decode(errors="replace").splitlines(), 1):
            found += [f"{file}:{number}: {what}" for what, pattern in FORBIDDEN.items() if re.search(pattern, line)]
    return found


def test_tree():
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    try:
        listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("not a git repository")
    files = [ROOT / name for name in listed.split("\0") if name]
    assert len(files) > 20
    assert faults([file for file in files if file.is_file()]) == []


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("see /ho" + "me/someone/x", "a path of one machine"),
        ("from pypi" + ".org", "a package index"),
        ("as in issue" + " 12", "a ticket"),
        ("x" * (LARGEST + 1), "bytes, more than"),
    ],
)
def test_finds_faults(tmp_path, text, what):
    file = tmp_path / "planted.txt"
    file.write_text(text)
    assert [what in fault for fault in faults([file])] == [True]


def test_lets_the_rest_pass(tmp_path):
    file = tmp_path / "clean.txt"
    file.write_text("/usr/bin/c++ and ./home/x and https://example.com/home/x")
    assert faults([file]) == []
