"""LayerNorm with a bias: where the decoder computes it, and that it is added last."""

from typing import Any

import pytest
import torch
from torch.nn.functional import layer_norm

from compress.errors import UnsupportedArch
from compress.models.norms import Norm
from tests.support.tiny_source import tiny_source


@pytest.mark.parametrize(
    ("norm", "block"), [("rms", "pre"), ("layer", "post"), ("layer", "sandwich"), ("rms", "parallel")]
)
def test_a_bias_of_another_norm_or_block_is_refused(norm: Any, block: Any) -> None:
    with pytest.raises(UnsupportedArch, match=f"norms have a bias, and are '{norm}' in a '{block}' block"):
        tiny_source().arch.replace(norm=norm, block=block, norm_bias=True)


def test_it_is_the_layer_norm_of_pytorch() -> None:
    generator = torch.Generator().manual_seed(0)
    x_TD, weight_D, bias_D = (torch.randn(*size, generator=generator) for size in ((5, 96), (96,), (96,)))
    norm = Norm(96, 1e-5, offset=1.0, centered=True, bias=True)
    norm.load_state_dict({"weight": weight_D, "bias": bias_D})
    expected = layer_norm(x_TD.double(), (96,), weight_D.double() + 1, bias_D.double(), 1e-5)
    torch.testing.assert_close(norm(x_TD).double(), expected, rtol=1e-6, atol=2e-6)
