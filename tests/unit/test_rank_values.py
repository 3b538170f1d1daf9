"""What one rank sends another arrives as it was."""

import json

import torch

from compress.calibrate.stats import MergeTree, Node, SecondMoment
from compress.quant.scheme import SCHEMES, QuantizedWeight
from compress.ranks import _plain, _restored


def sent(value: object) -> object:
    tensors: list[torch.Tensor] = []
    plain = json.dumps(_plain(value, tensors))
    places: list[torch.Tensor] = []
    received = _restored(json.loads(plain), places, torch.device("cpu"))
    for place, tensor in zip(places, tensors, strict=True):
        place.reshape(-1).view(torch.uint8).copy_(tensor.reshape(-1).view(torch.uint8))
    return received


def test_plain_values_arrive_as_they_were() -> None:
    value = {"rows": {"attn.q": {"error": 0.1 + 0.2, "dead": 3, "name": "ü"}}, 4: (None, True, [1, (2,)])}
    assert sent(value) == value


def test_weights_and_statistics_arrive_with_their_bits() -> None:
    codes_OI = torch.randn(6, 4).to(torch.float8_e4m3fn)
    weight = QuantizedWeight(
        SCHEMES["FP8_STATIC"],
        codes_OI,
        torch.rand(4, 6).t()[:, :1].to(torch.bfloat16),
        None,
        torch.tensor(0.5),
    )
    moment = SecondMoment()
    moment.update(torch.randn(5, 3))
    tree: MergeTree[SecondMoment] = MergeTree()
    tree.push(2, moment)
    received = sent(({"attn.q": weight}, tree.nodes(), torch.empty(0, 3)))
    assert isinstance(received, tuple)
    found, nodes, empty = received
    assert isinstance(found["attn.q"], QuantizedWeight)
    assert found["attn.q"].scheme == SCHEMES["FP8_STATIC"]
    assert torch.equal(found["attn.q"].dequantize(), weight.dequantize())
    assert torch.equal(found["attn.q"].input_scale, weight.input_scale)
    assert isinstance(nodes[0], Node)
    assert (nodes[0].begin, nodes[0].num_shards, nodes[0].stat.num_tokens) == (2, 1, 5)
    assert torch.equal(nodes[0].stat.mean(), moment.mean())
    assert empty.shape == (0, 3)
