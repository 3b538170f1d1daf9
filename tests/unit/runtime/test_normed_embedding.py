"""The embedding that is normed once, when a model is loaded."""

import pytest
import torch

from compress.models.embedding import normed
from compress.models.family import family_of
from compress.runtime import outer_weights
from compress.runtime.deployment import Deployment

VOCAB = 9001
BLOOM = {"model_type": "bloom", "vocab_size": VOCAB, "n_layer": 1, "n_head": 2, "hidden_size": 32}


def test_a_table_is_normed_some_rows_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A norm computes in float32, and BLOOM-7B1 has 250,880 rows of 4,096: all at once they took six times
    the bytes of the table."""
    arch = family_of(BLOOM).read_config(BLOOM)
    table = torch.randn(VOCAB, 32, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
    weight, bias = torch.linspace(0.5, 2, 32), torch.linspace(-1, 1, 32)
    at_once = []

    def counted(arch: object, x: torch.Tensor, norm_D: torch.Tensor) -> torch.Tensor:
        at_once.append(len(x))
        return normed(arch, x, norm_D)  # type: ignore[arg-type]

    monkeypatch.setattr(outer_weights, "normed", counted)
    outer = {"embed.weight": table, "embed.norm.weight": weight, "embed.norm.bias": bias}
    deployment = Deployment(torch.device("cpu"), torch.bfloat16, 1, 16)
    found = outer_weights.embedding(outer, arch, deployment)
    assert max(at_once) < VOCAB / 2
    expected = torch.nn.functional.layer_norm(
        table.float(), (32,), weight.bfloat16().float(), bias.bfloat16().float(), 1e-5
    )
    torch.testing.assert_close(found.float(), expected, rtol=2**-7, atol=2**-9)
