"""README's code runs, in the order in which a reader meets it."""

import re
from pathlib import Path

README = Path(__file__).parents[1] / "README.md"


def test_examples_run():
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(), re.S)
    assert len(blocks) >= 2
    namespace = {}
    for block in blocks:
        exec(compile(block, str(README), "exec"), namespace)
    assert namespace["int4"].shape == (64, 128)


def test_files_exist():
    text = README.read_text()
    names = re.findall(r"\]\(([\w/.]+)\)", text) + [
        f"tests/{n}" for n in re.findall(r"`(?:tests/)?(test_\w+\.py)`", text)
    ]
    assert len(names) > 8
    for name in names:
        assert (README.parent / name).is_file(), name
