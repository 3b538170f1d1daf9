"""A quantized checkpoint as `transformers` sees it: it loads without a stray key and computes what our own decoder computes of it."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tiny_hf import CASES, SMALL, saved, tokens

from compress.artifact.context import Context
from compress.calibrate.sequential import LayerPass, run_sequential
from compress.export import FORMATS, check_rules, open_checkpoint
from compress.methods.awq import Awq
from compress.methods.gptq import Gptq
from compress.models.arch import Arch
from compress.models.canonical import layer_name, load_weights
from compress.models.checkpoint import Checkpoint, write_checkpoint
from compress.models.family import FAMILIES, family_of
from compress.models.weights import build_decoder, dense
from compress.quant.scheme import SCHEMES, QuantizedWeight, Scheme
from compress.stages.quantize import RoundPass, SmoothPass

NUM_LAYERS = 2
WHOLE_GROUPS = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": NUM_LAYERS, "num_attention_heads": 4, "head_dim": 32}
EXPORTED = [
    ("llama-gqa", "W4A16_G128"),
    ("llama-all-biases", "W8A16"),
    ("llama-tied", "W4A16_G128"),
    ("mistral-window", "W4A16_G128"),
    ("qwen2", "W4A16_G128"),
    ("qwen2-tied-upper-windows", "W8A16"),
    ("qwen3", "W4A16_G128"),
    ("qwen3-biases", "W8A16"),
    ("llama-gqa", "W4A16_G128_ASYM"),
    ("qwen3-biases", "W4A16_G128_ASYM"),
]


class Stored:
    """The canonical files of a run as a weight source."""

    def __init__(self, source: Checkpoint, directory: Path, scheme: Scheme) -> None:
        self._source, self._directory, self._scheme = source, directory, scheme

    @property
    def arch(self) -> Arch:
        return self._source.arch

    def outer(self) -> dict[str, Any]:
        return self._source.outer()

    def layer(self, layer_idx: int) -> dict[str, Any]:
        return load_weights(self._directory / layer_name(layer_idx), self._scheme)


def quantized(tmp_path: Path, case: str, scheme: Scheme) -> tuple[Stored, Path]:
    """Quantize a tiny bf16 model with AWQ and GPTQ and export it; the canonical weights and the exported directory."""
    family, changes = CASES[case]
    layers = {key: value[:NUM_LAYERS] for key, value in changes.items() if key == "layer_types"}
    saved(tmp_path / "source", family, {**changes, **WHOLE_GROUPS, **layers}, dtype=torch.bfloat16)
    source = Checkpoint(tmp_path / "source")
    (tmp_path / "canonical").mkdir()
    passes: list[LayerPass] = [
        SmoothPass(Awq(num_ratios=3), scheme, torch.bfloat16),
        RoundPass(Gptq(), scheme, torch.bfloat16),
    ]
    ctx = Context("cpu", 0, tmp_path / "canonical")
    run_sequential(source, tokens(8, 16), passes, ctx.scratch, ctx, scheme=scheme, compute_dtype=torch.float32)
    stored = Stored(source, ctx.scratch, scheme)
    form = FORMATS.get("compressed-tensors")
    check_rules("compressed-tensors", source.arch, scheme)
    config = form.quantization_config(scheme, ignore=[family_of({"model_type": family}).to_disk("head")])
    (tmp_path / "exported").mkdir()
    write_checkpoint(tmp_path / "exported", stored, codec=form.codec, quantization_config=config, max_shard_bytes=200_000)
    return stored, tmp_path / "exported"


def test_every_family_is_exported() -> None:
    assert {CASES[case][0] for case, _ in EXPORTED} == set(FAMILIES.names())
    assert {scheme for _, scheme in EXPORTED} == set(SCHEMES)


@pytest.mark.parametrize(("case", "scheme_name"), EXPORTED)
def test_transformers_loads_the_export_and_computes_the_same(case: str, scheme_name: str, tmp_path: Path) -> None:
    scheme = SCHEMES[scheme_name]
    _, exported = quantized(tmp_path, case, scheme)
    how: dict[str, Any] = {}
    if not scheme.symmetric:  # this release of transformers keeps zero points only when it decompresses at load
        how["quantization_config"] = transformers.CompressedTensorsConfig(dequantize=True)
    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        exported, dtype=torch.bfloat16, attn_implementation="eager", output_loading_info=True, **how
    )
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs")), info
    decoder = build_decoder(open_checkpoint(exported), dtype=torch.bfloat16, device=torch.device("cpu"))
    reference = build_decoder(open_checkpoint(exported), dtype=torch.float32, device=torch.device("cpu"))
    original = build_decoder(Checkpoint(tmp_path / "source"), dtype=torch.float32, device=torch.device("cpu"))
    tokens_BS = tokens(2, 16)
    with torch.no_grad():
        theirs, ours = model.eval()(tokens_BS).logits.float(), decoder(tokens_BS).float()
        exact, before = reference(tokens_BS), original(tokens_BS)
    eps = torch.finfo(torch.bfloat16).eps
    # each of the about ten bf16 roundings a layer moves a logit by eps at random; the root mean square adds them up
    rms = float(exact.square().mean().sqrt())
    bound = eps * (10 * NUM_LAYERS) ** 0.5 * rms
    assert float((theirs - exact).square().mean().sqrt()) < bound
    assert float((ours - exact).square().mean().sqrt()) < bound
    assert float((theirs - ours).square().mean().sqrt()) < 2**0.5 * bound
    if scheme.num_bits == 4:
        assert float((before - exact).square().mean().sqrt()) > 2 * bound  # 4-bit codes differ from the source by more than bf16 does


@pytest.mark.parametrize(("case", "scheme_name"), EXPORTED)
def test_the_export_opens_with_the_same_codes_and_scales(case: str, scheme_name: str, tmp_path: Path) -> None:
    scheme = SCHEMES[scheme_name]
    stored, exported = quantized(tmp_path, case, scheme)
    opened = open_checkpoint(exported)
    assert set(opened.schemes) == {f"layers.{idx}.{name}" for idx in range(NUM_LAYERS) for name in stored.arch.layers[0].linears}
    assert set(opened.schemes.values()) == {scheme}
    assert opened.arch.replace(config={}) == stored.arch.replace(config={})
    pairs = [(opened.outer(), stored.outer()), *((opened.layer(idx), stored.layer(idx)) for idx in range(NUM_LAYERS))]
    for found, expected in pairs:
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            if isinstance(value, QuantizedWeight):
                again = found[name]
                assert isinstance(again, QuantizedWeight)
                assert torch.equal(again.codes_OI, value.codes_OI)
                assert torch.equal(again.scale_OG, value.scale_OG)
                assert again.scale_OG.dtype == torch.bfloat16
                assert (again.zero_point_OG is None) == scheme.symmetric
                if value.zero_point_OG is not None and again.zero_point_OG is not None:
                    assert torch.equal(again.zero_point_OG, value.zero_point_OG)
            else:
                assert torch.equal(dense(found[name]), value), name


@pytest.mark.parametrize("case", ["llama-gqa", "qwen3-biases"])
def test_the_library_decompresses_each_weight_to_our_bits(case: str, tmp_path: Path) -> None:
    """compressed-tensors' own decompression inside transformers, weight by weight."""
    scheme = SCHEMES["W4A16_G128_ASYM"]
    stored, exported = quantized(tmp_path, case, scheme)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        exported, dtype=torch.bfloat16, quantization_config=transformers.CompressedTensorsConfig(dequantize=True)
    )
    weights = dict(model.named_parameters())
    family = family_of({"model_type": stored.arch.family})
    for idx in range(NUM_LAYERS):
        for name, value in stored.layer(idx).items():
            disk = family.to_disk(f"layers.{idx}.{name.rpartition('.')[0]}") + "." + name.rpartition(".")[2]
            expected = value.dequantize() if isinstance(value, QuantizedWeight) else value
            assert torch.equal(weights[disk].to(torch.bfloat16), expected), disk
    assert SMALL["vocab_size"] == weights["model.embed_tokens.weight"].shape[0]
