"""The plan of an ONNX export: its bytes on disk are those of the files, and its memory that of a shard."""

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from compress.export.format_writer import GRAPH_SHARD_BYTES, write_format
from compress.models.arch import Arch
from compress.models.checkpoint_writer import MAX_SHARD_BYTES
from compress.models.family import family_of
from compress.models.random_source import RandomSource
from compress.models.weights import dense
from compress.quant.scheme import SCHEMES, QuantizedWeight
from compress.stages import STAGES, Estimate, PlanFacts
from compress.stages.budget.costs import matrix_bytes
from compress.stages.export import Export
from compress.stages.quantize.schemes import mixed_schemes, model_scheme, outer_bytes
from compress.stages.quantize.spec import Quantize
from tests.contract.test_formats_contract import CONFIG

pytest.importorskip("onnx")
CPU = torch.device("cpu")
DENSE_DOWN = {"*.ffn.down": "dense"}


def model_of(**changes: Any) -> Arch:
    config = {**CONFIG, "architectures": ["LlamaForCausalLM"], "vocab_size": 512, **changes}
    return family_of(config).read_config(config)


def planned(form: str, arch: Arch, quantize: dict[str, Any] | None) -> Estimate:
    specs = {} if quantize is None else {"quantize": Quantize.model_validate(quantize)}
    return STAGES.get("export").estimate(Export(formats=(form,)), PlanFacts(arch, "cpu", specs))


class DenseDown(RandomSource):
    """A random source whose second linears of the FFN are dense."""

    def layer(self, layer_idx: int) -> dict[str, Tensor | QuantizedWeight]:
        weights = super().layer(layer_idx)
        return {**weights, "ffn.down.weight": dense(weights["ffn.down.weight"]).to(torch.bfloat16)}


@pytest.mark.parametrize("form", ["onnx", "onnx-float16"])
@pytest.mark.parametrize(
    "quantize",
    [
        {"scheme": "W4A16_G32"},
        {"scheme": "W4A16_G32", "head": "W8A16"},
        {"scheme": "W8A16", "head": "W8A16"},
        {"scheme": "W4A16_G64_ASYM", "overrides": DENSE_DOWN},
        {"scheme": "W8A16", "overrides": DENSE_DOWN},
        None,
    ],
)
def test_the_plan_of_a_graph_format_has_the_bytes_of_its_weights(
    form: str, quantize: dict[str, Any] | None, tmp_path: Path
) -> None:
    arch = model_of()
    spec = None if quantize is None else Quantize.model_validate(quantize)
    scheme = None if spec is None else model_scheme(spec, arch)
    kind = DenseDown if quantize is not None and "overrides" in quantize else RandomSource
    source = kind(
        arch,
        device=CPU,
        dtype=torch.float16,
        scheme=None if scheme is None else scheme.layers,
        head_scheme=None if scheme is None else scheme.head,
    )
    write_format(form, tmp_path, source, scheme)
    written = sum(each.stat().st_size for each in tmp_path.glob("*.safetensors"))
    assert planned(form, arch, quantize).disk_bytes == pytest.approx(written, rel=0.02)


@pytest.mark.parametrize("ratio", [0.4, 0.55, 0.9])
def test_a_budget_is_counted_in_16_bits_and_planned_in_the_bytes_of_the_format(ratio: float) -> None:
    arch = model_of()
    arch = arch.replace(layers=arch.layers[:1])
    quantize = {"scheme": {"schemes": ["W4A16_G32", "W8A16", "dense"], "budget": {"size_ratio": ratio}}}
    spec = Quantize.model_validate(quantize)
    assert not isinstance(spec.scheme, str)
    groups = mixed_schemes(spec, spec.scheme, arch)
    limit = int(ratio * 2 * arch.num_linear_params)
    most = max(
        sum(each.num_bytes(arch, scheme, itemsize=4) for each, scheme in zip(groups, picks, strict=True))
        for picks in itertools.product(*(each.schemes for each in groups))
        if sum(each.num_bytes(arch, scheme) for each, scheme in zip(groups, picks, strict=True)) <= limit
    )
    assert planned("onnx", arch, quantize).disk_bytes == most + 2 * outer_bytes(arch, None)


def test_a_scale_has_the_bytes_of_a_dense_weight_and_codes_keep_theirs() -> None:
    scheme = SCHEMES["W4A16_G32"]
    sizes = [matrix_bytes(64, 128, scheme, itemsize=itemsize) for itemsize in (2, 4)]
    assert sizes == [64 * 128 // 2 + 64 * 4 * itemsize for itemsize in (2, 4)]
    assert matrix_bytes(64, 128, None, itemsize=4) == 4 * 64 * 128


def test_the_memory_of_a_graph_is_a_shard_of_its_own_size_beside_embedding_and_head() -> None:
    shallow = model_of(hidden_size=4096, intermediate_size=16384, num_attention_heads=32, num_hidden_layers=8)
    deep = shallow.replace(layers=shallow.layers * 2)
    quantize = {"scheme": "W8A16"}
    outer_size = 2 * 4 * 512 * 4096
    for arch in (shallow, deep):
        assert planned("onnx", arch, quantize).peak_bytes == GRAPH_SHARD_BYTES + outer_size
        assert planned("onnx", arch, None).peak_bytes == GRAPH_SHARD_BYTES + outer_size
    deepest = shallow.replace(layers=shallow.layers * 3)
    assert planned("gptq", deepest, quantize).peak_bytes == MAX_SHARD_BYTES
    wide = shallow.replace(vocab_size=200_000)  # a larger tensor than a shard has its own
    embed_size = 4 * 200_000 * 4096
    assert planned("onnx", wide, quantize).peak_bytes == 3 * embed_size
