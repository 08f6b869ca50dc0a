"""Inputs that find rounding faults: ties, their neighbours, range ends, special values, random bits."""

import numpy as np
import torch
from torch import Tensor

FLOAT_MAX = 3.4028234663852886e38
SPECIAL = [0.0, -0.0, float("nan"), float("inf"), -float("inf"), 1e-45, -1e-45, 2.0**-126, FLOAT_MAX, -FLOAT_MAX]


def nasty(n: int, scale: float, low: int, high: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    """n values around what rounds to codes between low and high at this scale."""
    rng = np.random.default_rng(seed)
    kind = rng.integers(0, 5, n)
    halves = (rng.integers(2 * low - 4, 2 * high + 5, n) / 2).astype(np.float32) * np.float32(scale)
    moved = halves.view(np.int32) + rng.integers(-2, 3, n).astype(np.int32)
    random_bits = rng.integers(-(2**31), 2**31, n).astype(np.int32)
    spread = (rng.standard_normal(n) * scale * (high - low) / 3).astype(np.float32)
    special = rng.choice(np.array(SPECIAL, dtype=np.float32), n)
    x = np.select(
        [kind == 0, kind == 1, kind == 2, kind == 3],
        [halves, moved.view(np.float32), random_bits.view(np.float32), spread],
        special,
    ).astype(np.float32)
    return torch.from_numpy(x).to(dtype)
