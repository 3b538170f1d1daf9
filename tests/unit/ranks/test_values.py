"""A value that one rank sends another arrives with its bits, and an object travels as its parts."""

import json
from typing import Any

import pytest
import torch

from compress.calibrate.layer_run import LayerRun
from compress.calibrate.layer_state import LayerState
from compress.calibrate.stats import MergeTree, Node, SecondMoment
from compress.context import OneRank
from compress.data.tokens import TokenSet
from compress.quant.scheme import SCHEMES, QuantizedWeight
from compress.ranks.values import decode, encode
from compress.stages.distill.text import TrainingText


def sent(value: object) -> Any:
    """Return what a rank receives that is sent `value`."""
    tensors: list[torch.Tensor] = []
    encoded = json.dumps(encode(value, tensors))
    targets: list[torch.Tensor] = []
    received = decode(json.loads(encoded), targets, torch.device("cpu"))
    for target, tensor in zip(targets, tensors, strict=True):
        target.reshape(-1).view(torch.uint8).copy_(tensor.reshape(-1).view(torch.uint8))
    return received


def test_plain_values_arrive_as_they_were() -> None:
    value = {"rows": {"attn.q": {"error": 0.1 + 0.2, "dead": 3, "name": "ü"}}, 4: (None, True, [1, (2,)])}
    assert sent(value) == value


def test_tensors_arrive_with_their_bits() -> None:
    codes_OI = torch.randn(6, 4).to(torch.float8_e4m3fn)
    strided, empty, received_codes = sent(
        (torch.rand(4, 6).t()[:, :1].to(torch.bfloat16), torch.empty(0, 3), codes_OI)
    )
    assert (strided.shape, strided.dtype) == ((6, 1), torch.bfloat16)
    assert empty.shape == (0, 3)
    assert torch.equal(received_codes.view(torch.uint8), codes_OI.view(torch.uint8))


def test_an_object_is_refused() -> None:
    with pytest.raises(TypeError, match="a SecondMoment cannot be sent to another rank: send its parts"):
        sent({"moment": SecondMoment()})


@pytest.mark.parametrize("halved", [False, True])
def test_statistics_arrive_as_they_were(halved: bool) -> None:
    moment = SecondMoment()
    moment.update(torch.randn(5, 3))
    tree: MergeTree[SecondMoment] = MergeTree()
    tree.push(2, moment)
    (node,) = tree.nodes() if halved else [Node(2, 1, moment)]
    received = Node.from_parts(sent(node.to_parts()), SecondMoment)
    assert (received.begin, received.num_shards, received.stat.num_tokens) == (2, 1, 5)
    assert torch.equal(received.stat.mean(), node.stat.mean())


def test_results_of_a_layer_arrive_as_they_were() -> None:
    scheme = SCHEMES["FP8_STATIC"]
    codes_OI = torch.randn(6, 4).to(torch.float8_e4m3fn)
    weight = QuantizedWeight(
        scheme,
        codes_OI,
        torch.rand(6, 1).to(torch.bfloat16),
        None,
        torch.tensor(0.5),
        input_zero_point=torch.tensor(-3, dtype=torch.int8),
    )
    run = LayerRun.on_one_rank(torch.zeros(1, 1, 1))
    of_sender, of_receiver = (
        LayerState(0, [], [], {"attn.q.weight": torch.zeros(6, 4)}, {}, run) for _ in "sr"
    )
    of_sender.quantize("attn.q", weight)
    of_sender.row("attn.q")["error"] = 0.25
    of_receiver.merge_results(sent(of_sender.results_for(["attn.q", "attn.k"])))
    found = of_receiver.quantized["attn.q"]
    assert found.scheme == scheme
    assert torch.equal(found.dequantize(), weight.dequantize())
    assert found.input_scale is not None
    assert torch.equal(found.input_scale, torch.tensor(0.5))
    assert found.input_zero_point is not None
    assert found.input_zero_point.item() == -3
    assert of_receiver.rows == {"attn.q": {"layer": 0, "linear": "attn.q", "error": 0.25}}
    assert of_receiver.weights == {}


def test_the_text_of_a_distillation_arrives_as_it_was() -> None:
    tokens_NS = torch.arange(12, dtype=torch.int32).view(3, 4)
    text = TrainingText(TokenSet(tokens_NS, 7, 5, {"title": "words", "license": "MIT"}), tokens_NS[:1], 9)
    received = TrainingText.from_parts(sent(text.to_parts()))
    assert torch.equal(received.training.tokens_NS, tokens_NS)
    assert received.facts == {**text.facts}
    assert torch.equal(received.held_out_NS, tokens_NS[:1])
    assert received.num_bytes == 9


def test_a_single_rank_has_its_own_values() -> None:
    ranks = OneRank()
    assert ranks.from_lead(lambda: 3) == ranks.broadcast(3) == 3
    assert ranks.all_gather("a") == ["a"]
    assert ranks.send([1], source=0, to=0) == [1]
