"""Loads the compiled library, which defines the ops under torch.ops.linquant."""

from pathlib import Path
from typing import Any

import torch

_FOLDER = Path(__file__).parent
_OLDEST_TORCH = (2, 11)


def load(folder: Path = _FOLDER) -> None:
    """Load `_C`, once a process; loading it again does nothing.

    Raises:
        ImportError: if torch is too old, or if the library is missing or does not load.
    """
    version = tuple(int(part) for part in torch.__version__.split(".")[:2])
    if version < _OLDEST_TORCH:
        raise ImportError(f"torch_linquant: the ops need torch >= 2.11, but got torch {torch.__version__}.")
    path = folder / "_C.so"
    if not path.is_file():
        raise ImportError(
            f"torch_linquant: the compiled library must be at {path}, but there is none. "
            "Build it with `pip install --no-build-isolation -e .` in the package's repository."
        )
    try:
        torch.ops.load_library(path)
    except OSError as error:
        raise ImportError(
            f"torch_linquant: the compiled library {path} must load, but got: {error}. "
            "Build it again with the torch that is installed here."
        ) from error


def default_arguments(op: Any) -> dict[str, Any]:
    """What an overload takes for its keyword arguments where they are left out."""
    arguments = [a for a in op._schema.arguments if a.kwarg_only and a.has_default_value()]
    return {a.name: [0] if a.name == "block_size" else a.default_value for a in arguments}


load()
