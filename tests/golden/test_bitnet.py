"""Checkpoints of BitNet b1.58, whose linears compute with weights of three values and inputs of eight bits:
they are read in the scheme that computes the same."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from compress.cli.app import main
from compress.errors import UnsupportedFormat
from compress.export import FORMATS, codecs, open_checkpoint
from compress.export.bitnet import LEAST_MEAN, ternary
from compress.models.checkpoint import arch_of
from compress.models.weights import build_decoder
from compress.quant.scheme import SCHEMES, QuantizedWeight
from compress.runtime.engine import Engine
from compress.runtime.engine_config import EngineConfig
from tests.support.tiny_hf import build_config, saved, tokens

ONLINE = {
    "quant_method": "bitnet",
    "linear_class": "autobitlinear",
    "quantization_mode": "online",
    "modules_to_not_convert": None,
}
WIDE = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2}
PUBLISHED = Path(__file__).parent / "configs/others.json"


def published(directory: Path, dtype: torch.dtype = torch.float32, **stated: Any) -> None:
    """Save a tiny BitNet as it is published."""
    saved(directory, "bitnet", {**WIDE, "tie_word_embeddings": True}, dtype=dtype)
    config = json.loads((directory / "config.json").read_text())
    config["quantization_config"] = {**ONLINE, **stated}
    (directory / "config.json").write_text(json.dumps(config))


def served(path: Path, tokens_BS: Tensor) -> Tensor:
    config = EngineConfig(dtype=torch.float32, max_batch_size=2, max_model_len=48)
    engine = Engine(open_checkpoint(path), device=torch.device("cpu"), config=config)
    with torch.inference_mode():
        return engine.runner.score(tokens_BS)


def theirs(path: Path, tokens_BS: Tensor) -> Tensor:
    """Return the logits of `transformers`, without its compiler."""
    model = transformers.AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager").eval()
    with torch.no_grad(), torch.compiler.set_stance("force_eager"):
        logits: Tensor = model(tokens_BS).logits
    return logits


def rms(x: Tensor) -> float:
    return float(x.square().mean().sqrt())


@pytest.mark.parametrize("dense", [None, ["lm_head", "down_proj"]])
def test_served_logits_are_those_of_transformers(dense: list[str] | None, tmp_path: Path) -> None:
    published(tmp_path, modules_to_not_convert=dense)
    source = open_checkpoint(tmp_path)
    assert any(name.endswith("down") for name in source.schemes) == (dense is None)
    tokens_BS = tokens(2, 24)
    expected = theirs(tmp_path, tokens_BS)
    errors = served(tmp_path, tokens_BS) - expected
    weights_alone = build_decoder(source, dtype=torch.float32, device=torch.device("cpu"))
    with torch.no_grad():
        of_inputs = rms(weights_alone(tokens_BS) - expected)
    assert errors.abs().median() < 1e-5 * rms(expected)
    # An input between two integers is rounded to the other one now and then.
    assert rms(errors) < 0.25 * of_inputs
    plain = json.loads((tmp_path / "config.json").read_text())
    del plain["quantization_config"]
    (tmp_path / "config.json").write_text(json.dumps(plain))
    assert rms(served(tmp_path, tokens_BS) - expected) > 4 * of_inputs  # dense weights are others


def test_every_linear_of_a_layer_is_in_codes_of_three_values(tmp_path: Path) -> None:
    published(tmp_path, dtype=torch.bfloat16)
    source = open_checkpoint(tmp_path)
    assert set(source.schemes.values()) == {SCHEMES["INT8_DYNAMIC"]}
    linears = {
        f"layers.{idx}.{name}" for idx, layer in enumerate(source.arch.layers) for name in layer.linears
    }
    assert source.schemes.keys() == linears
    stored = source.files.get("model.layers.0.mlp.up_proj.weight").float()
    weight = source.layer(0)["ffn.up.weight"]
    assert isinstance(weight, QuantizedWeight)
    assert set(weight.codes_OI.unique().tolist()) == {-1, 0, 1}
    mean = stored.abs().mean()
    assert torch.equal(weight.codes_OI.float(), (stored / mean).round().clamp(-1, 1))
    assert torch.equal(weight.scale_OG, mean.to(torch.bfloat16).expand(256, 1))
    assert source.files.get("model.embed_tokens.weight").dtype == torch.bfloat16


def test_weights_of_zeros_have_a_scale() -> None:
    zeros = ternary(torch.zeros(4, 8))
    assert not zeros.codes_OI.any()
    assert torch.equal(zeros.scale_OG, torch.full((4, 1), LEAST_MEAN))


def test_it_is_converted_exactly_to_a_format_that_transformers_loads(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    published(tmp_path / "model", dtype=torch.bfloat16)
    out = str(tmp_path / "out")
    code = main(["convert", str(tmp_path / "model"), "--to", "compressed-tensors", "--out", out, "--json"])
    text, err = capsys.readouterr()
    assert code == 0, err + text
    tokens_BS = tokens(2, 12)
    assert torch.equal(served(tmp_path / "out", tokens_BS), served(tmp_path / "model", tokens_BS))
    _, info = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))


@pytest.mark.parametrize(
    ("stated", "said"),
    [
        ({"quantization_mode": "offline"}, "in quantization_mode offline .* packed in bytes"),
        ({"linear_class": "bitlinear"}, "linear_class bitlinear"),
        ({"use_rms_norm": True}, "use_rms_norm"),
        ({"group_size": 4}, "has group_size, which is not read"),
    ],
)
def test_other_forms_are_refused(stated: dict[str, Any], said: str) -> None:
    config = build_config("bitnet", {}).to_dict() | {"quantization_config": {**ONLINE, **stated}}
    with pytest.raises(UnsupportedFormat, match=said):
        arch_of(config, codecs())


def test_codes_of_another_tool_are_refused(tmp_path: Path) -> None:
    published(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    name = "model.layers.1.self_attn.o_proj.weight"
    tensors[name] = tensors[name].to(torch.uint8)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UnsupportedFormat, match="its weight is uint8"):
        open_checkpoint(tmp_path).layer(1)


def test_it_is_read_and_not_written() -> None:
    assert "bitnet" in codecs()
    assert "bitnet" not in FORMATS.names()
    with pytest.raises(UnsupportedFormat, match="read and not written"):
        codecs()["bitnet"].encode(ternary(torch.ones(2, 4)))


def test_the_published_model_has_the_parameters_that_its_report_states() -> None:
    """About 2 billions without the embedding of 0.3 (arXiv 2504.12285)."""
    rows = {row["name"]: row["config"] for row in json.loads(PUBLISHED.read_text())}
    arch = arch_of(rows["microsoft/bitnet-b1.58-2B-4T-bf16"], codecs())
    assert arch.num_params == 2_412_820_480
    assert arch.tied_head
