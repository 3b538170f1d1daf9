"""The parts of an ONNX export: how codes lie in bytes, what one linear computes in ONNX Runtime, the config
of ONNX Runtime GenAI, and what is refused.
"""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import Tensor

from compress.artifact.tensors import TensorFiles, save_tensors
from compress.context import SilentProgress
from compress.errors import EnvironmentUnfit, UnsupportedFormat
from compress.export import FORMATS, dense_itemsize, open_checkpoint
from compress.export.conversion import convert
from compress.export.format_writer import write_format
from compress.export.onnx.genai import genai_config, refusal_of_genai
from compress.export.onnx.graph import MICROSOFT, Graph, element_type
from compress.export.onnx.linears import Linears
from compress.export.refusals import check_rules
from compress.kernels.operands.rows import INT8, ActivationQuant, quantize
from compress.models.checkpoint_writer import write_checkpoint
from compress.models.family import family_of
from compress.models.random_source import RandomSource
from compress.models.weights import Dense
from compress.pipeline import resolve_source
from compress.quant.kv import FP8_STATIC, INT4_TOKEN_HEAD
from compress.quant.model_scheme import ModelScheme
from compress.quant.scheme import SCHEMES, QuantizedWeight
from compress.runtime.engine_config import EngineConfig
from tests.contract.test_formats_contract import CONFIG, arch, random_weight

onnxruntime = pytest.importorskip("onnxruntime")
pytest.importorskip("onnx")
CPU = torch.device("cpu")


def source_of(**changes: Any) -> RandomSource:
    config = {**CONFIG, "architectures": ["LlamaForCausalLM"], **changes}
    facts = family_of(config).read_config(config)
    return RandomSource(facts, device=CPU, dtype=torch.bfloat16, scheme=SCHEMES["W4A16_G32"])


@pytest.mark.parametrize("scheme", ["W4A16_G32", "W4A16_G128_ASYM"])
def test_four_bit_codes_lie_as_the_operator_reads_them(scheme: str) -> None:
    weight = random_weight(SCHEMES[scheme], 7, 384)
    leaves = FORMATS.get("onnx").codec.encode(weight)
    stored = leaves["weight_nibbles"].numpy().reshape(7, -1)
    codes = np.stack((stored & 15, stored >> 4), axis=-1).reshape(7, -1).astype(np.int64) - 8
    assert (codes == weight.codes_OI.numpy()).all()
    if weight.zero_point_OG is not None:
        zeros = leaves["weight_zero_point"].numpy()
        for row in range(7):
            for group in range(3):
                nibble = (zeros[row, group // 2] >> (4 * (group % 2))) & 15
                assert int(nibble) - 8 == int(weight.zero_point_OG[row, group])


def linear_in_onnx_runtime(directory: Path, weight: QuantizedWeight, x_TI: Tensor) -> Tensor:
    """Return what ONNX Runtime computes of the first `ffn.down` of a model with this weight."""
    facts = arch(hidden_size=weight.shape[0], intermediate_size=weight.shape[1], dtype="float32")
    family = family_of({"model_type": "llama"})
    name = "layers.0.ffn.down"
    leaves = FORMATS.get("onnx").codec.encode(weight)
    save_tensors(
        directory / "model.safetensors",
        {f"{family.to_disk(name)}.{leaf}": tensor for leaf, tensor in leaves.items()},
    )
    graph = Graph(TensorFiles(directory))
    x = graph.input("x", torch.float32, ["rows", weight.shape[1]])
    y = Linears(graph, facts, family, ModelScheme(weight.scheme))(x, name)
    graph.output(y, "y", torch.float32, ["rows", weight.shape[0]])
    graph.save(directory / "linear.onnx", producer="test", version="0")
    session = onnxruntime.InferenceSession(str(directory / "linear.onnx"), providers=["CPUExecutionProvider"])
    return torch.from_numpy(session.run(["y"], {"x": x_TI.numpy()})[0])


@pytest.mark.parametrize("scheme", ["W4A16_G32", "W4A16_G64_ASYM", "W4A16_G128_ASYM", "W8A16"])
def test_rows_of_the_identity_give_the_dequantized_weights_to_the_bit(scheme: str, tmp_path: Path) -> None:
    weight = random_weight(SCHEMES[scheme], 64, 384)
    found = linear_in_onnx_runtime(tmp_path, weight, torch.eye(384))
    assert torch.equal(found, weight.dequantize(torch.float32).t())


def test_products_of_the_largest_codes_are_exact_integers(tmp_path: Path) -> None:
    """Signed codes would saturate here on a CPU with AVX2 and without VNNI: 2 x 255 x 127 needs 17 bits."""
    weight = random_weight(SCHEMES["INT8_DYNAMIC"], 64, 256)
    generator = torch.Generator().manual_seed(0)
    signs = torch.randint(0, 2, (64, 256), generator=generator) * 2 - 1
    ones = torch.ones(64, 1)
    extreme = QuantizedWeight(weight.scheme, (127 * signs).to(torch.int8), ones)
    x_TI = 127.0 * (torch.randint(0, 2, (9, 256), generator=generator) * 2 - 1)
    found = linear_in_onnx_runtime(tmp_path, extreme, x_TI)
    assert torch.equal(found, x_TI @ (127.0 * signs).t())


def test_inputs_are_rounded_as_the_runtime_rounds_them(tmp_path: Path) -> None:
    weight = random_weight(SCHEMES["INT8_DYNAMIC"], 64, 256)
    x_TI = torch.randn(9, 256, generator=torch.Generator().manual_seed(0))
    x_TI[3] = 0
    rows = quantize(x_TI, ActivationQuant(dtype=INT8))
    sums = rows.values_TK.to(torch.float64) @ weight.codes_OI.to(torch.float64).t()
    expected = sums * rows.scale_T.unsqueeze(1).double() * weight.scale_OG.double().t()
    found = linear_in_onnx_runtime(tmp_path, weight, x_TI).double()
    assert (found - expected).abs().max() <= 4 * torch.finfo(torch.float32).eps * expected.abs().max()


def test_constants_that_are_equal_are_stored_once(tmp_path: Path) -> None:
    save_tensors(tmp_path / "model.safetensors", {"w": torch.arange(12.0).view(4, 3)})
    graph = Graph(TensorFiles(tmp_path))
    assert graph.constant([1, 2], torch.int64) == graph.constant(torch.tensor([1, 2]), torch.int64)
    assert graph.constant([1], torch.int64) != graph.constant(1, torch.int64)
    assert graph.constant(1, torch.int64) != graph.constant(1, torch.float32)


def test_rows_of_a_tensor_are_a_range_of_its_bytes(tmp_path: Path) -> None:
    tensor = torch.arange(12.0).view(4, 3)
    save_tensors(tmp_path / "model.safetensors", {"a": torch.zeros(5), "w": tensor})
    graph = Graph(TensorFiles(tmp_path))
    x = graph.input("x", torch.float32, [2, 3])
    graph.output(graph.op("Add", x, graph.stored("w", (2, 3), (1, 3))), "y", torch.float32, [2, 3])
    graph.save(tmp_path / "rows.onnx", producer="test", version="0")
    session = onnxruntime.InferenceSession(str(tmp_path / "rows.onnx"), providers=["CPUExecutionProvider"])
    (found,) = session.run(["y"], {"x": np.zeros((2, 3), dtype=np.float32)})
    assert torch.equal(torch.from_numpy(found), tensor[1:3])
    assert MICROSOFT not in {each.domain for each in _model(tmp_path / "rows.onnx").opset_import}


def _model(path: Path) -> Any:
    import onnx

    return onnx.load(path, load_external_data=False)


@pytest.mark.parametrize("kv_format", [FP8_STATIC, INT4_TOKEN_HEAD])
def test_a_quantized_cache_is_refused(kv_format: str) -> None:
    with pytest.raises(UnsupportedFormat, match=r"\[kv-cache\] .*" + kv_format):
        check_rules("onnx", arch(), ModelScheme(SCHEMES["W4A16_G128"]), kv_format)


@pytest.mark.parametrize(
    ("scheme", "rule"),
    [
        ("FP8_DYNAMIC", "float-codes"),
        ("FP8_BLOCK", "float-codes"),
        ("NVFP4", "float-codes"),
        ("W3A16_G128", "bits"),
        ("W4A16_CHANNEL", "block-size"),
    ],
)
def test_schemes_without_an_operator_are_refused_by_name(scheme: str, rule: str) -> None:
    with pytest.raises(UnsupportedFormat, match=rf"\[{rule}\]"):
        check_rules("onnx", arch(), ModelScheme(SCHEMES[scheme]))


def test_the_extra_is_named_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "onnx", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(EnvironmentUnfit) as refusal:
        write_format("onnx", tmp_path, source_of(), ModelScheme(SCHEMES["W4A16_G32"]))
    assert "compress[onnx]" in str(refusal.value.hint)
    assert not any(tmp_path.iterdir())


def test_weights_too_large_for_float16_are_refused(tmp_path: Path) -> None:
    class Huge(RandomSource):
        def outer(self) -> dict[str, Tensor | QuantizedWeight]:
            return {**super().outer(), "norm.weight": torch.full((256,), 1e5, dtype=torch.bfloat16)}

    small = source_of()
    huge = Huge(small.arch, device=CPU, dtype=torch.bfloat16, scheme=SCHEMES["W4A16_G32"])
    with pytest.raises(UnsupportedFormat, match=r"\[finite-weights\] norm.weight"):
        write_format("onnx-float16", tmp_path, huge, ModelScheme(SCHEMES["W4A16_G32"]))


def test_a_dense_model_is_converted_to_a_graph_and_an_ordinary_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "source").mkdir()
    write_checkpoint(tmp_path / "source", Dense(source_of()))
    model = resolve_source(str(tmp_path / "source"), offline=True)
    artifact = convert(model, "onnx", tmp_path / "onnx", progress=SilentProgress())
    assert artifact.manifest.arch is not None
    assert artifact.manifest.arch["dtype"] == "bfloat16"
    assert "quantization_config" not in json.loads((tmp_path / "onnx" / "config.json").read_text())
    before, after = (open_checkpoint(tmp_path / name) for name in ("source", "onnx"))
    for name, weight in before.layer(1).items():
        again = after.layer(1)[name]
        assert isinstance(weight, Tensor)
        assert isinstance(again, Tensor)
        assert torch.equal(again, weight.to(torch.float32))
    with pytest.raises(UnsupportedFormat, match="dense"):
        convert(model, "gptq", tmp_path / "gptq", progress=SilentProgress())


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize(("form", "stored"), [("onnx", torch.float32), ("onnx-float16", torch.float16)])
@pytest.mark.parametrize("scheme", ["W4A16_G32", None])
def test_the_runtime_serves_a_graph_format_in_the_dtype_of_the_model(
    scheme: str | None, form: str, stored: torch.dtype, dtype: str, tmp_path: Path
) -> None:
    small = source_of(dtype=dtype)
    coded = None if scheme is None else SCHEMES[scheme]
    source = RandomSource(small.arch, device=CPU, dtype=torch.float16, scheme=coded)  # scales fit both
    write_format(form, tmp_path, source, None if coded is None else ModelScheme(coded))
    written = open_checkpoint(tmp_path)
    sizes = EngineConfig()
    assert sizes.dtype_for(written.arch, torch.device("cuda")) == getattr(torch, dtype)
    assert sizes.dtype_for(written.arch, CPU) == torch.float32
    norm = written.layer(0)["attn_norm.weight"]
    assert isinstance(norm, Tensor)
    assert norm.dtype == stored
    (logits,) = [each for each in _model(tmp_path / "model.onnx").graph.output if each.name == "logits"]
    assert logits.type.tensor_type.elem_type == element_type(stored)


@pytest.mark.parametrize("form", ["onnx", "compressed-tensors"])
def test_groups_divide_the_inputs_of_the_linears_that_have_them(form: str) -> None:
    facts = arch(hidden_size=960, intermediate_size=2560, num_attention_heads=15, num_key_value_heads=5)
    wide = SCHEMES["W4A16_G128"]
    downs = tuple((f"layers.{idx}.ffn.down", wide) for idx in range(2))
    queries = tuple((f"layers.0.attn.{name}", wide) for name in "qkv")
    layers = SCHEMES["W4A16_G64"]
    check_rules(form, facts, ModelScheme(layers, exceptions=downs))
    check_rules(form, facts, ModelScheme(layers, head=SCHEMES["W8A16"], exceptions=downs))
    with pytest.raises(UnsupportedFormat, match=r"\[whole-groups\] attn\.q has K = 960, .* 128\.") as refusal:
        check_rules(form, facts, ModelScheme(layers, exceptions=(*downs, *queries)))
    assert "attn.o" not in str(refusal.value)
    with pytest.raises(UnsupportedFormat, match=r"\[whole-groups\] head has K = 960, .* 128\."):
        check_rules(form, facts, ModelScheme(layers, head=wide, exceptions=downs))


def test_a_layout_of_the_cache_that_genai_lacks_is_a_note_and_no_refusal() -> None:
    facts = arch()
    assert refusal_of_genai(facts) is None
    narrow = facts.replace(
        layers=(facts.layers[0], type(facts.layers[1])(**{**vars(facts.layers[1]), "head_dim": 32}))
    )
    assert refusal_of_genai(narrow)


def test_token_ids_of_the_model_reach_genai(tmp_path: Path) -> None:
    ids = genai_config(arch(bos_token_id=[5], eos_token_id=[2, 3]), "model.onnx", tmp_path)["model"]
    assert (ids["bos_token_id"], ids["eos_token_id"], ids["pad_token_id"]) == (5, [2, 3], 2)
    assert genai_config(arch(), "model.onnx", tmp_path)["model"]["bos_token_id"] == -1


def test_token_ids_of_generation_and_of_the_tokenizer_reach_genai(tmp_path: Path) -> None:
    """Later files count where earlier ones state nothing."""

    def ids(**config: Any) -> tuple[int, Any, int]:
        found = genai_config(arch(**config), "model.onnx", tmp_path)["model"]
        return found["bos_token_id"], found["eos_token_id"], found["pad_token_id"]

    tokenizer = Tokenizer(WordLevel({"<pad>": 11, "<bos>": 12, "a": 0}, unk_token="a"))
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    named = {"bos_token": {"content": "<bos>"}, "pad_token": "<pad>", "eos_token": None}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(named))
    assert ids(eos_token_id=2) == (12, 2, 11)
    assert ids(eos_token_id=2, bos_token_id=None, text_config={"bos_token_id": 6}) == (6, 2, 11)
    assert ids(eos_token_id=2, bos_token_id=7, pad_token_id=0) == (7, 2, 0)
    (tmp_path / "generation_config.json").write_text('{"bos_token_id": 8, "eos_token_id": [2, 9]}')
    assert ids(eos_token_id=2, bos_token_id=7, pad_token_id=0) == (8, [2, 9], 0)
    (tmp_path / "generation_config.json").write_text("[1]")
    with pytest.raises(UnsupportedFormat, match="is not a JSON object"):
        ids()


def test_plans_count_dense_weights_in_the_dtype_of_the_graph() -> None:
    names = ("onnx", "onnx-float16", "gptq", "compressed-tensors")
    sizes = {
        dtype: [dense_itemsize(name, arch(dtype=dtype)) for name in names]
        for dtype in ("bfloat16", "float32")
    }
    assert sizes == {"bfloat16": [4, 2, 2, 2], "float32": [4, 2, 4, 4]}
