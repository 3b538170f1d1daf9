"""ONNX decoders compute in ONNX Runtime what `transformers`, and the codes of an artifact done plainly, give:
prefill, cached decode and padded rows.
"""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from compress.errors import UnsupportedFormat
from compress.export import open_checkpoint
from compress.export.format_writer import write_format
from compress.export.refusals import check_rules
from compress.models.checkpoint import Checkpoint, arch_of
from compress.models.family import family_of
from compress.models.random_source import RandomSource
from compress.models.weights import build_decoder
from compress.quant.model_scheme import ModelScheme
from compress.quant.scheme import SCHEMES, QuantizedWeight
from scripts.check_interop import LIMITS, Answer, ask_runtime, compare
from scripts.consumer_logprobs import ask_onnxruntime_genai
from scripts.interop_families import FAMILIES
from scripts.interop_families import SMALL as SMALL_128
from scripts.plain_twin import twin
from tests.golden.test_families import tolerance
from tests.support.onnx_session import logits_of
from tests.support.tiny_cases import CASES
from tests.support.tiny_hf import build_config, saved, tokens

pytest.importorskip("onnx")
CPU = torch.device("cpu")
SEQ_LEN = 24
PREFILL = [(0, SEQ_LEN)]
STEPS = [(0, 9), (9, 13), *((i, i + 1) for i in range(13, SEQ_LEN))]
REFUSED = {
    "activation": ("apertus", "minimax-m3-text-dense"),
    "recurrences": (
        "qwen3_5_text",
        "hybrid-h",
        "bamba",
        "jamba",
        "mamba",
        "lfm2",
        "lfm3",
        "nemotron_h",
        "falcon_h1",
        "olmo_hybrid",
    ),
    "attention-sinks": ("granite_swa", "mimo_v2_flash-dense"),
    "latent-attention": ("youtu", "minicpm3", "deepseek_v3-dense", "deepseek_v32-dense"),
    "experts": (
        "qwen3_next",
        "kimi_linear",
        "bailing_hybrid",
        "granitemoe",
        "_moe",
        "-moe",
        "kimi_k25",
        "mixtral",
        "olmoe",
        "minimax",
        "dots1",
        "solar_open",
        "mellum",
        "flex_olmo",
        "gpt-oss",
        "llama4-scout",
        "llama4-maverick",
        "llama4-listed-layers",
        "gemma4-experts",
        "hy_v3",
        "deepseek_v2",
        "deepseek_ocr2",
        "deepseek_v3",
        "deepseek_v32",
        "deepseek_v4",
        "glm_moe_dsa",
        "glm5_next",
        "hy_v4",
        "qwen4_exp",
        "afmoe",
        "axk1",
        "longcat_flash",
        "axk2",
        "dots3_note",
        "kolibri1",
        "hunyuan_v1_moe",
        "flint",
        "laguna",
        "mimo_v2_flash",
        "cohere2_moe",
        "aria_text",
        "mistral_large4",
        "phimoe",
        "dbrx",
    ),
    "language-model-only": (
        "qwen3_5",
        "vision",
        "vl",
        "perception_lm",
        "video_llama_3",
        "mistral3-",
        "llava",
        "mllama",
        "molmo2",
        "got_ocr2",
        "chart2table",
        "qwen2_5_omni",
        "paligemma",
        "shieldgemma2",
        "glm4v",
        "glm46v",
        "gemma4_unified",
        "glm_ocr",
        "exaone4_5",
        "lighton_ocr",
        "hyperclovax_vision",
        "idefics2",
        "idefics3",
        "cosmos3_edge",
        "muse_glimmer",
        "muse_spark",
        "ovis2",
        "minicpmv",
        "minicpm_ocr",
        "qianfan",
        "step3p7",
        "janus",
        "docling",
        "glmga",
        "multimodal",
        "aria",
        "inkling_mm",
        "voxtral",
        "flamingo",
        "qwen2_audio",
        "_asr",
        "glmasr",
        "granite_speech",
    ),
    "relative-logits": ("inkling_text",),
    "clipped-qkv": ("olmo-clipped",),
    "alibi": ("falcon-alibi", "bloom", "mpt"),
    "sub-norms": ("bitnet",),
    "normed-sums": ("openai-gpt",),
    "longrope": ("longrope",),
    "norms-of-heads": ("norms-of-heads",),
    "shared-keys-values": ("gemma4-e", "shared-keys"),
    "streams": ("gemma3n",),
}
"""Rule -> parts of the names of cases that it refuses, but for `DENSE`."""
DENSE = ("granitemoehybrid", "granitemoehybrid-no-positions", "gemma4-equal-widths")
"""Cases whose names say more than their layers have."""


def refusal(case: str) -> str | None:
    if case in DENSE:
        return None
    return next(
        (rule for rule, parts in REFUSED.items() if any(part in case for part in parts)),
        None,
    )


WRITTEN = [case for case in CASES if refusal(case) is None]
QUICK = (
    "llama-all-biases",
    "llama-yarn-mscale",
    "mistral-window",
    "qwen3",
    "phi3-partial-tied",
    "phi3-partial-heads-above-a-block",
    "gemma2",
    "gemma4",
    "granite-tied-biases",
    "olmo2",
    "glm4",
    "ministral3",
    "cohere",
    "llama-llama3-rope",
)
"""Cases that hold every fact of the graph once; the others repeat them in other families."""
EACH_CASE = [case if case in QUICK else pytest.param(case, marks=pytest.mark.slow) for case in WRITTEN]


@pytest.mark.parametrize("case", EACH_CASE)
def test_logits_equal_those_of_transformers_in_prefill_and_in_cached_decode(
    case: str, tmp_path: Path
) -> None:
    model = saved(tmp_path / "source", *CASES[case])
    (tmp_path / "onnx").mkdir()
    write_format("onnx", tmp_path / "onnx", Checkpoint(tmp_path / "source"), None)
    tokens_BS = tokens(2, SEQ_LEN)
    with torch.no_grad():
        expected = model(tokens_BS).logits
    atol = tolerance(expected)
    for steps in (PREFILL, STEPS):
        assert (logits_of(tmp_path / "onnx", tokens_BS, steps) - expected).abs().max() <= atol
    assert (expected - expected.roll(1, dims=1)).abs().max() > 1000 * atol


@pytest.mark.parametrize("case", ["phi3-longrope-short", "qwen3-moe", "gemma3-vision"])
def test_a_fact_that_the_graph_does_not_express_is_refused_before_a_file_is_written(
    case: str, tmp_path: Path
) -> None:
    saved(tmp_path / "source", *CASES[case])
    (tmp_path / "onnx").mkdir()
    with pytest.raises(UnsupportedFormat, match=rf"\[{refusal(case)}\]"):
        write_format("onnx", tmp_path / "onnx", Checkpoint(tmp_path / "source"), None)
    assert not any((tmp_path / "onnx").iterdir())


def test_every_model_is_written_or_refused_by_name_from_its_config_alone() -> None:
    refused = {}
    for case, (family, changes) in CASES.items():
        config = build_config(family, changes).to_dict() | {"dtype": "float32"}
        try:
            check_rules("onnx", arch_of(config, {}), None)
        except UnsupportedFormat as error:
            refused[case] = re.findall(r"\[([a-z-]+)\]", str(error))
    assert {case for case in CASES if refusal(case)} == set(refused)
    assert {case: rules for case, rules in refused.items() if refusal(case) not in rules} == {}


def test_norms_of_models_that_are_not_written_are_those_of_the_decoder(tmp_path: Path) -> None:
    """Muse Glimmer has other parts than a language model; a plain model with its norms has none."""
    saved(tmp_path / "source", *CASES["gemma2"])
    arch = Checkpoint(tmp_path / "source").arch
    facts = {"embed_norm": True, "plain_final_norm": True, "post_norm_eps": 0.05}
    heads = {"unit_qk_norm": True, "unit_norm_unrotated": True}
    source = RandomSource(arch.replace(**facts, **heads), device=CPU, dtype=torch.float32)
    (tmp_path / "onnx").mkdir()
    write_format("onnx", tmp_path / "onnx", source, None)
    tokens_BS = tokens(2, SEQ_LEN)
    with torch.no_grad():
        expected = build_decoder(source, dtype=torch.float32, device=CPU)(tokens_BS)
    atol = tolerance(expected)
    for steps in (PREFILL, STEPS):
        assert (logits_of(tmp_path / "onnx", tokens_BS, steps) - expected).abs().max() <= atol


def test_rows_padded_on_the_left_give_the_logits_of_rows_alone(tmp_path: Path) -> None:
    saved(tmp_path / "source", *CASES["gemma2"])
    (tmp_path / "onnx").mkdir()
    write_format("onnx", tmp_path / "onnx", Checkpoint(tmp_path / "source"), None)
    long = tokens(1, SEQ_LEN)
    short = long[:, 7:]
    rows = torch.cat((long, torch.cat((torch.zeros(1, 7, dtype=torch.int64), short), dim=1)))
    padded = logits_of(tmp_path / "onnx", rows, STEPS, padding=torch.tensor([0, 7]))
    alone = [logits_of(tmp_path / "onnx", each, [(0, each.shape[1])]) for each in (long, short)]
    atol = tolerance(alone[0])
    assert (padded[0] - alone[0][0]).abs().max() <= atol
    assert (padded[1, 7:] - alone[1][0]).abs().max() <= atol


def quantized(directory: Path, family: str, scheme: str, form: str = "onnx") -> RandomSource:
    """Write a random model whose widths are multiples of 128 in a scheme, and return its source."""
    config: dict[str, Any] = {**SMALL_128, "model_type": family, **FAMILIES[family]}
    arch = family_of(config).read_config(config)
    source = RandomSource(arch, device=CPU, dtype=torch.bfloat16, scheme=SCHEMES[scheme])
    write_format(form, directory, source, ModelScheme(SCHEMES[scheme]))
    return source


def logprobs(logits: Tensor) -> Tensor:
    return torch.log_softmax(logits, dim=-1)


@pytest.mark.parametrize(
    ("family", "scheme"),
    [
        ("llama", "W4A16_G128"),
        ("qwen2", "W4A16_G64_ASYM"),
        ("phi3", "W4A16_G32_ASYM"),
        ("glm", "W4A16_G128_ASYM"),
        ("gemma3_text", "W8A16"),
        ("glm", "W8A16"),
        ("gpt_neox", "W4A16_G128_ASYM"),
    ],
)
def test_weight_only_codes_give_the_logprobs_of_the_artifact(
    family: str, scheme: str, tmp_path: Path
) -> None:
    source = quantized(tmp_path, family, scheme)
    written = open_checkpoint(tmp_path)
    for idx in range(source.arch.num_layers):
        again = written.layer(idx)
        for name, weight in source.layer(idx).items():
            if isinstance(weight, QuantizedWeight):
                other = again[name]
                assert isinstance(other, QuantizedWeight)
                assert torch.equal(other.dequantize(torch.float32), weight.dequantize(torch.float32))
    tokens_BS = tokens(2, SEQ_LEN)
    with torch.no_grad():
        expected = twin(tmp_path, "compress")(tokens_BS)
    for steps in (PREFILL, STEPS):
        found = logits_of(tmp_path, tokens_BS, steps)
        assert (found - expected).abs().max() <= 4 * tolerance(expected)  # 512 features, not 80
        assert torch.equal(found.argmax(dim=-1), expected.argmax(dim=-1))


@pytest.mark.parametrize(
    ("family", "scheme", "form"),
    [
        ("llama", "INT8_DYNAMIC", "onnx"),
        ("glm", "INT8_DYNAMIC", "onnx"),
        ("gpt_neox", "INT8_DYNAMIC", "onnx"),
        ("llama", "W4A16_G128_ASYM", "onnx-float16"),
        ("gemma3_text", "W8A16", "onnx-float16"),
        ("phi3", "W4A16_G64", "onnx-float16"),
    ],
)
def test_rounded_inputs_and_float16_stay_within_the_limits_of_interop(
    family: str, scheme: str, form: str, tmp_path: Path
) -> None:
    quantized(tmp_path, family, scheme, form)
    tokens_BS = tokens(2, SEQ_LEN)
    with torch.no_grad():
        expected = logprobs(twin(tmp_path, "compress")(tokens_BS))
    chosen = expected.argmax(dim=-1, keepdim=True)
    for steps in (PREFILL, STEPS):
        found = logprobs(logits_of(tmp_path, tokens_BS, steps))
        apart = (found - expected).gather(-1, chosen).abs()
        assert apart.mean() <= 0.02
        assert apart.max() <= 0.15


@pytest.mark.parametrize(("family", "scheme"), [("llama", "W4A16_G64_ASYM"), ("phi3", "W8A16")])
def test_onnx_runtime_genai_writes_the_tokens_of_this_runtime(
    family: str, scheme: str, tmp_path: Path
) -> None:
    pytest.importorskip("onnxruntime_genai")
    quantized(tmp_path, family, scheme)
    prompts = [tuple(row) for row in tokens(3, 12).tolist()]
    asked = {"model": str(tmp_path), "max_tokens": 12, "prompts": prompts}
    theirs = [Answer(**each) for each in ask_onnxruntime_genai(asked)]
    for mine, other in zip(ask_runtime(tmp_path, prompts, 12), theirs, strict=True):
        end = len(other.tokens)  # a text may end early there
        cut = replace(mine, tokens=mine.tokens[:end], logprobs=mine.logprobs[:end])
        row = compare(cut, other)
        assert row.verdict(*LIMITS["float32"]) is None
        assert row.num_generated == end > 0


def test_codes_of_inputs_are_refused_where_16_bits_would_decide_them(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedFormat, match=r"\[rounded-inputs\] INT8_DYNAMIC"):
        quantized(tmp_path, "llama", "INT8_DYNAMIC", "onnx-float16")


def test_what_is_written_is_read_back_and_written_again_alike(tmp_path: Path) -> None:
    (tmp_path / "first").mkdir()
    (tmp_path / "second").mkdir()
    quantized(tmp_path / "first", "phi3", "W4A16_G64_ASYM")
    again = open_checkpoint(tmp_path / "first")
    write_format("onnx", tmp_path / "second", again, ModelScheme(SCHEMES["W4A16_G64_ASYM"]))
    for file in (tmp_path / "first").iterdir():
        assert file.read_bytes() == (tmp_path / "second" / file.name).read_bytes(), file.name
    assert build_decoder(again, dtype=torch.float32, device=CPU).arch.dtype == "bfloat16"


def test_every_dense_weight_is_on_disk_once(tmp_path: Path) -> None:
    import onnx

    saved(tmp_path / "source", *CASES["phi3"], dtype=torch.bfloat16)
    (tmp_path / "onnx").mkdir()
    source = Checkpoint(tmp_path / "source")
    write_format("onnx", tmp_path / "onnx", source, None)
    stated = onnx.load(tmp_path / "onnx" / "model.onnx", load_external_data=False)
    files = {entry.value for each in stated.graph.initializer for entry in each.external_data[:1]}
    assert files == {"model.safetensors"}
    whole = onnx.load(tmp_path / "onnx" / "model.onnx")
    embed = next(each for each in whole.graph.initializer if each.name == "model.embed_tokens.weight")
    stored = source.outer()["embed.weight"]
    assert isinstance(stored, Tensor)
    assert torch.equal(torch.from_numpy(onnx.numpy_helper.to_array(embed).copy()), stored.to(torch.float32))
