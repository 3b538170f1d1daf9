"""A tiny model with a tokenizer, and a disturbed one beside it."""

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from compress.export import open_weights
from compress.models.arch import Arch
from compress.models.weights import WeightSource
from compress.quant.scheme import QuantizedWeight
from compress.runtime.engine import Engine
from compress.runtime.engine_config import EngineConfig
from compress.validate.tasks.text_model import TextModel
from tests.support.tiny_model import write_tiny_model


@dataclass(frozen=True)
class Disturbed:
    """A source whose layers have noise added to their weights."""

    base: WeightSource
    size: float
    kv_format: str | None = None

    @property
    def arch(self) -> Arch:
        return self.base.arch

    def outer(self) -> dict[str, torch.Tensor | QuantizedWeight]:
        return self.base.outer()

    def layer(self, layer_idx: int) -> dict[str, torch.Tensor | QuantizedWeight]:
        generator = torch.Generator().manual_seed(layer_idx)
        return {
            name: weight + self.size * weight.abs().mean() * torch.randn(weight.shape, generator=generator)
            if isinstance(weight, torch.Tensor)
            else weight
            for name, weight in self.base.layer(layer_idx).items()
        }


@pytest.fixture(scope="package")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="package")
def models(model_dir: Path) -> dict[str, TextModel]:
    """`source`, and a `candidate` that is off by some noise."""
    config = EngineConfig(max_batch_size=4, max_model_len=128)
    weights = open_weights(model_dir)
    sides = {"source": weights, "candidate": Disturbed(weights, 0.3)}
    return {
        side: TextModel(Engine(own, device=torch.device("cpu"), config=config), model_dir)
        for side, own in sides.items()
    }
