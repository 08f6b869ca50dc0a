"""DTensor, FSDP2 and DDP on 2 and 4 processes against one process (tests/distributed_cases.py)."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent

pytestmark = [
    pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch is built without torch.distributed"),
    pytest.mark.xdist_group("distributed"),
]


@pytest.mark.parametrize("world", [2, 4])
def test_every_case(world, tmp_path):
    environment = {**os.environ, "PYTHONPATH": str(HERE.parent), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(HERE / "distributed_cases.py")]
    processes = [
        subprocess.Popen(
            [*command, str(rank), str(world), str(tmp_path / "store")],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(world)
    ]
    try:
        outputs = [process.communicate(timeout=240)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    for rank, (process, output) in enumerate(zip(processes, outputs, strict=True)):
        assert process.returncode == 0 and "5 cases passed" in output, f"rank {rank}:\n{output[-4000:]}"
