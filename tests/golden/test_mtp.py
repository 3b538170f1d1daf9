"""MTP heads of checkpoints against the modules of `transformers` that they are made of."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from compress.errors import UnsupportedArch, UnsupportedFormat, UsageError
from compress.export import codecs, open_checkpoint
from compress.export.draft import open_mtp
from compress.models.attention import FullAttention
from compress.models.mtp import MtpHead
from compress.models.mtp_reader import has_mtp, num_heads, read_mtp, read_mtps
from compress.models.weights import dense
from compress.quant.numerics import nearest_weight
from compress.quant.scheme import SCHEMES, QuantizedWeight
from tests.golden.test_families import tolerance
from tests.support.tiny_hf import saved, tokens
from tests.support.tiny_mtp import MTP_CASES, saved_with_mtp

CPU = torch.device("cpu")
SEVERAL = {
    "mimo_v2_flash": "target",
    "step3p7": "stream",
    "step3p7-as-published": "stream",
    "glm4-moe": "normed",
}
"""Cases with several heads, and the hidden states that they feed to the next."""
WIDTHS = {
    **dict.fromkeys(("hidden_size", "intermediate_size", "moe_intermediate_size"), 128),
    **{"head_dim": 32, "num_attention_heads": 4, "num_key_value_heads": 4},
}
"""Whole blocks of FP8 in each linear."""


def read(path: Path) -> MtpHead:
    return read_mtp(open_checkpoint(path), codecs())


def tensors_of(path: Path) -> dict[str, Tensor]:
    return load_file(path / "model.safetensors")


def rewrite(path: Path, tensors: dict[str, Tensor]) -> None:
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize("case", MTP_CASES)
@pytest.mark.one_in(3)
def test_a_head_computes_what_its_modules_do(case: str, tmp_path: Path) -> None:
    reference = saved_with_mtp(tmp_path, case)
    head = read(tmp_path).decoder(dtype=torch.float32, device=CPU)
    tokens_BS = tokens(2, 23)
    hidden_BSD = reference.target(tokens_BS, output_hidden_states=True).hidden_states[-1][:, :-1]
    expected, _ = reference.after(hidden_BSD, tokens_BS[:, 1:])
    embedded_BSD = reference.target.get_input_embeddings()(tokens_BS[:, 1:])
    found = head.normed(head(embedded_BSD, hidden_BSD, torch.arange(22), FullAttention()))
    assert float((found - expected).abs().max()) <= tolerance(expected)
    norm = read(tmp_path).weights["target_norm.weight"]
    source = open_checkpoint(tmp_path).outer()["norm.weight"]
    assert isinstance(norm, Tensor)
    assert isinstance(source, Tensor)
    assert torch.equal(norm, source)


@pytest.mark.parametrize(("case", "feeds"), SEVERAL.items())
def test_each_of_several_heads_computes_what_its_modules_do(case: str, feeds: str, tmp_path: Path) -> None:
    """The i-th reads the i-th next token, and hidden states of the model or of the head before."""
    reference = saved_with_mtp(tmp_path, case, num_heads=3)
    checkpoint = open_checkpoint(tmp_path)
    heads = read_mtps(checkpoint, codecs())
    assert num_heads(checkpoint) == len(heads) == 3
    tokens_BS = tokens(2, 23)
    hidden_BSD = reference.target(tokens_BS, output_hidden_states=True).hidden_states[-1]
    read_BSD = hidden_BSD
    for idx, (head, own) in enumerate(zip(heads, (reference, *reference.further), strict=True)):
        assert head.facts.feeds == feeds
        module = head.decoder(dtype=torch.float32, device=CPU)
        read_BSD = (hidden_BSD if feeds == "target" else read_BSD)[:, : 22 - idx]
        embedded_BSD = reference.target.get_input_embeddings()(tokens_BS[:, 1 + idx :])
        found = module(embedded_BSD, read_BSD, torch.arange(22 - idx), FullAttention())
        expected, stream_BSD = own.outputs_of(read_BSD, tokens_BS[:, 1 + idx :])
        wanted = stream_BSD if feeds == "stream" else expected
        assert float((found - wanted).abs().max()) <= tolerance(wanted)
        read_BSD = wanted
    weights = [head.weights["fc.weight"] for head in heads]
    assert not torch.equal(dense(weights[0]), dense(weights[1]))


def in_blocks_of_fp8(path: Path, *, of_head: bool) -> None:
    """Store the linears of the layers as DeepSeek-V3 does, those of the head's layer among them or not."""
    tensors = tensors_of(path)
    config = json.loads((path / "config.json").read_text())
    head = f"layers.{config['num_hidden_layers']}."
    linears = [name for name in tensors if name.endswith(("_proj.weight", "_qkvz.weight"))]
    for name in (each for each in linears if not each.endswith("eh_proj.weight")):
        if of_head or head not in name:
            weight = nearest_weight(tensors[name], SCHEMES.get("FP8_BLOCK"), torch.float32)
            tensors[name] = weight.codes_OI
            tensors[f"{name}_scale_inv"] = weight.scale_OG
    rewrite(path, tensors)
    quantization = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic"}
    config["quantization_config"] = {**quantization, "weight_block_size": [128, 128]}
    (path / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize("of_head", [True, False])
def test_linears_of_a_head_are_read_as_they_are_stored(of_head: bool, tmp_path: Path) -> None:
    """Programs that quantize may leave the head as it was, and not list it."""
    saved_with_mtp(tmp_path, "glm4-moe", **WIDTHS)
    dense = read(tmp_path)
    in_blocks_of_fp8(tmp_path, of_head=of_head)
    head = read(tmp_path)
    codes = {name for name, each in head.weights.items() if isinstance(each, QuantizedWeight)}
    assert bool(codes) == of_head
    assert all(name.startswith("layers.0.") for name in codes)
    assert head.weights.keys() == dense.weights.keys()
    for name, each in head.weights.items():
        original = dense.weights[name]
        assert isinstance(original, Tensor)
        if isinstance(each, QuantizedWeight):
            error = (each.dequantize().float() - original).abs().max() / original.abs().max()
            assert 0 < float(error) < 0.05, name
        else:
            assert torch.equal(each, original), name


def test_a_checkpoint_without_a_head_is_refused(tmp_path: Path) -> None:
    saved_with_mtp(tmp_path, "glm4-moe")
    assert has_mtp(open_checkpoint(tmp_path))
    tensors = tensors_of(tmp_path)
    joins = [name for name in tensors if name.endswith("eh_proj.weight")]
    layer = joins[0].removesuffix("eh_proj.weight")
    rewrite(tmp_path, {name: each for name, each in tensors.items() if not name.startswith(layer)})
    assert not has_mtp(open_checkpoint(tmp_path))
    with pytest.raises(UsageError, match=r"stores no layer that predicts a further token \(no tensor"):
        read(tmp_path)


def test_a_head_that_lacks_a_tensor_is_refused(tmp_path: Path) -> None:
    saved_with_mtp(tmp_path, "glm4-moe")
    tensors = tensors_of(tmp_path)
    name = next(each for each in tensors if each.endswith(".shared_head.norm.weight"))
    del tensors[name]
    rewrite(tmp_path, tensors)
    with pytest.raises(UnsupportedArch, match=r"lacks the tensor .*shared_head\.norm\.weight"):
        open_mtp(tmp_path)


def test_a_tensor_of_the_layer_that_is_not_read_is_refused(tmp_path: Path) -> None:
    saved_with_mtp(tmp_path, "glm4-moe")
    tensors = tensors_of(tmp_path)
    name = next(each for each in tensors if each.endswith("eh_proj.weight")).replace("eh_proj", "gate_proj")
    rewrite(tmp_path, tensors | {name: torch.ones(3)})
    with pytest.raises(UnsupportedArch, match=r"holds the tensor .*gate_proj\.weight', which an MTP head"):
        open_mtp(tmp_path)


def test_codes_that_no_config_explains_are_refused(tmp_path: Path) -> None:
    saved_with_mtp(tmp_path, "qwen3_5_text")
    tensors = tensors_of(tmp_path)
    tensors["mtp.fc.weight"] = tensors["mtp.fc.weight"].to(torch.float8_e4m3fn)
    rewrite(tmp_path, tensors)
    with pytest.raises(UnsupportedFormat, match=r"'mtp\.fc\.weight' is .*names no quantization"):
        open_mtp(tmp_path)


def test_a_family_without_heads_is_refused(tmp_path: Path) -> None:
    saved(tmp_path, "llama", {})
    with pytest.raises(UsageError, match="llama models are read without a layer that predicts"):
        open_mtp(tmp_path)
    with pytest.raises(UsageError, match="is no checkpoint"):
        open_mtp(tmp_path / "nothing")
