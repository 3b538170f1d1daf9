"""`compress convert` on tiny models: the same logits, and the way back gives the same bytes; and checkpoints
made by others.
"""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models
from torch import Tensor

from compress.artifact.manifest import open_artifact, verify_artifact
from compress.cli.app import main
from compress.errors import EnvironmentUnfit, UnsupportedArch, UnsupportedFormat
from compress.export import FORMATS, open_checkpoint
from compress.export.format_writer import write_format
from compress.export.refusals import check_rules
from compress.kernels.operands.rows import ActivationQuant, quantize
from compress.models.arch import Arch
from compress.models.checkpoint import Checkpoint
from compress.models.family import family_of
from compress.models.weights import build_decoder, dense
from compress.quant.model_scheme import ModelScheme, with_exceptions
from compress.quant.numerics import nearest_weight
from compress.quant.scheme import SCHEMES, QuantizedWeight, Scheme
from compress.runtime.engine import Engine
from compress.runtime.engine_config import EngineConfig
from compress.stages.budget.spec import scheme_or_dense
from tests.support import packed_numpy
from tests.support.packed_numpy import Linear
from tests.support.tiny_cases import CASES
from tests.support.tiny_hf import build_config, saved, tokens

WHOLE_GROUPS = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "head_dim": 32,
}
LINEARS = (
    "self_attn.q_proj",
    "self_attn.k_proj",
    "self_attn.v_proj",
    "self_attn.o_proj",
    "mlp.gate_proj",
    "mlp.up_proj",
    "mlp.down_proj",
)
Say = Callable[..., tuple[int, str, str]]


class Rounded:
    """A dense model with every linear rounded to nearest as its scheme says."""

    def __init__(self, source: Checkpoint, scheme: ModelScheme) -> None:
        self._source = source
        self._scheme = scheme

    @property
    def arch(self) -> Arch:
        return self._source.arch

    @property
    def kv_format(self) -> str | None:
        return self._source.kv_format

    def _round(self, weight: Any, scheme: Scheme) -> QuantizedWeight:
        return nearest_weight(dense(weight), scheme, getattr(torch, self.arch.dtype))

    def outer(self) -> dict[str, Any]:
        outer = self._source.outer()
        head = self._scheme.head
        return outer if head is None else outer | {"head.weight": self._round(outer["head.weight"], head)}

    def layer(self, layer_idx: int) -> dict[str, Any]:
        layer = self._source.layer(layer_idx)
        for linear in self.arch.layers[layer_idx].linears:
            if (scheme := self._scheme.for_linear(f"layers.{layer_idx}.{linear}")) is not None:
                layer[f"{linear}.weight"] = self._round(layer[f"{linear}.weight"], scheme)
        return layer


def compressed(
    tmp_path: Path,
    case: str,
    scheme: str,
    *,
    head: str | None = None,
    dtype: torch.dtype = torch.bfloat16,
    **changes: Any,
) -> Path:
    """A compressed-tensors checkpoint of a tiny model."""
    family, of_case = CASES[case]
    saved(tmp_path / "source", family, {**of_case, **WHOLE_GROUPS, **changes}, dtype=dtype)
    whole = ModelScheme(SCHEMES[scheme], SCHEMES[head] if head else None)
    (tmp_path / "compressed").mkdir()
    write_format(
        "compressed-tensors", tmp_path / "compressed", Rounded(Checkpoint(tmp_path / "source"), whole), whole
    )
    (tmp_path / "compressed" / "tokenizer.json").write_text("{}")
    return tmp_path / "compressed"


@pytest.fixture
def say(capsys: pytest.CaptureFixture[str]) -> Say:
    """Runs the command: (exit code, stdout, stderr)."""

    def call(*argv: object) -> tuple[int, str, str]:
        capsys.readouterr()
        code = main([str(each) for each in argv])
        out, err = capsys.readouterr()
        return code, out, err

    return call


def logits(path: Path) -> Tensor:
    config = EngineConfig(dtype=torch.float32, max_batch_size=2, max_model_len=48, kv_cache_bytes=1 << 24)
    engine = Engine(open_checkpoint(path), device=torch.device("cpu"), config=config)
    with torch.inference_mode():
        return engine.runner.score(tokens(2, 24)).clone()


def content(path: Path) -> dict[str, bytes]:
    return {each.name: each.read_bytes() for each in sorted(path.iterdir()) if each.name != "compress.json"}


@pytest.mark.parametrize(
    ("case", "scheme", "to"),
    [
        ("llama-gqa", "W4A16_G128", "gptq"),
        ("llama-gqa", "W4A16_G128", "awq"),
        ("qwen3-biases", "W4A16_G128_ASYM", "awq"),
        ("llama-all-biases", "W8A16", "gptq"),
        ("mistral-window", "W4A16_G32", "gptq"),
        ("qwen2-tied-upper-windows", "W4A16_G64_ASYM", "awq"),
        ("llama-tied", "W4A16_CHANNEL", "gptq"),
    ],
)
def test_there_the_logits_are_the_same_and_the_way_back_gives_the_same_bytes(
    case: str, scheme: str, to: str, say: Say, tmp_path: Path
) -> None:
    source = compressed(tmp_path, case, scheme)
    code, out, err = say("convert", source, "--to", to, "--out", tmp_path / "there", "--json")
    assert code == 0, err
    document = json.loads(out)
    assert (document["format"], document["scheme"]["name"], document["path"]) == (
        to,
        scheme,
        str(tmp_path / "there"),
    )
    verify_artifact(open_artifact(tmp_path / "there"))
    assert document["digest"] == open_artifact(tmp_path / "there").digest
    there = open_checkpoint(tmp_path / "there")
    assert there.schemes == open_checkpoint(source).schemes
    assert torch.equal(logits(tmp_path / "there"), logits(source))
    code, _, err = say(
        "convert", tmp_path / "there", "--to", "compressed-tensors", "--out", tmp_path / "back"
    )
    assert code == 0, err
    assert content(tmp_path / "back") == content(source)


@pytest.mark.parametrize(
    ("case", "scheme", "to"),
    [
        ("phi3-window-gqa", "W4A16_G128", "gptq"),
        ("phi3-partial-tied", "W8A16", "gptq"),
        ("phi3-window-gqa", "W4A16_G128_ASYM", "awq"),
        ("phi3-window-gqa", "FP8_BLOCK", "fp8"),
        ("glm4", "W4A16_G64", "gptq"),
        ("glm", "W4A16_G32_ASYM", "awq"),
        ("glm4", "FP8_BLOCK", "fp8"),
        ("cohere-untied-biases", "W4A16_CHANNEL", "gptq"),
        ("ernie4_5-biases", "W4A16_G128_ASYM", "awq"),
    ],
)
def test_stacked_linears_and_rows_in_another_order_go_there_and_back(
    case: str, scheme: str, to: str, say: Say, tmp_path: Path
) -> None:
    source = compressed(tmp_path, case, scheme, num_key_value_heads=4)
    code, _, err = say("convert", source, "--to", to, "--out", tmp_path / "there")
    assert code == 0, err
    one, other = open_checkpoint(source), open_checkpoint(tmp_path / "there")
    assert one.schemes == other.schemes
    for idx in range(one.arch.num_layers):
        ours, theirs = one.layer(idx), other.layer(idx)
        assert all(torch.equal(dense(ours[name]), dense(theirs[name])) for name in ours)
    code, _, err = say(
        "convert", tmp_path / "there", "--to", "compressed-tensors", "--out", tmp_path / "back"
    )
    assert code == 0, err
    assert content(tmp_path / "back") == content(source)


@pytest.mark.parametrize(
    ("case", "linears", "rule"),
    [
        ("phi3-window-gqa", {"layers.0.attn.q": "W8A16"}, "stacked-linears"),
        ("phi3-window-gqa", {"layers.0.ffn.up": "dense"}, "stacked-linears"),
        ("phi3-window-gqa", {}, "whole-blocks-on-disk"),
    ],
)
def test_what_one_tensor_on_disk_cannot_hold_is_refused_by_name(
    case: str, linears: dict[str, str], rule: str, tmp_path: Path
) -> None:
    family, changes = CASES[case]
    arch = family_of({"model_type": family}).read_config(build_config(family, changes).to_dict())
    layers = SCHEMES["FP8_BLOCK" if rule == "whole-blocks-on-disk" else "FP8_DYNAMIC"]
    others = {linear: scheme_or_dense(name) for linear, name in linears.items()}
    scheme = with_exceptions(layers, others)
    assert rule in {each.name for each in FORMATS.get("compressed-tensors").broken_rules(arch, scheme)}
    with pytest.raises(UnsupportedFormat, match=r"one tensor|in blocks"):
        check_rules("compressed-tensors", arch, scheme)


@pytest.mark.parametrize("to", ["gptq", "awq"])
def test_the_tensors_on_disk_mean_what_numpy_reads(to: str, say: Say, tmp_path: Path) -> None:
    source = compressed(tmp_path, "llama-gqa", "W4A16_G128")
    assert say("convert", source, "--to", to, "--out", tmp_path / "there")[0] == 0
    tensors = load_file(tmp_path / "there" / "model.safetensors")
    layer = open_checkpoint(source).layer(1)
    for disk, name in (("self_attn.k_proj", "attn.k.weight"), ("mlp.down_proj", "ffn.down.weight")):
        prefix = f"model.layers.1.{disk}."
        leaves = {
            key.removeprefix(prefix): value.numpy()
            for key, value in tensors.items()
            if key.startswith(prefix)
        }
        read = (
            packed_numpy.awq_unpacked(leaves) if to == "awq" else packed_numpy.gptq_unpacked(leaves, bits=4)
        )
        weight = layer[name]
        assert isinstance(weight, QuantizedWeight)
        assert torch.equal(torch.from_numpy(read.values()), weight.dequantize(torch.float32))


def test_a_quantized_head_goes_into_gptq_in_the_scheme_of_the_layers_only(say: Say, tmp_path: Path) -> None:
    source = compressed(tmp_path, "llama-gqa", "W8A16", head="W8A16", vocab_size=104)
    code, _, err = say("convert", source, "--to", "gptq", "--out", tmp_path / "there")
    assert code == 0, err
    assert (
        json.loads((tmp_path / "there" / "config.json").read_text())["quantization_config"]["lm_head"] is True
    )
    assert open_checkpoint(tmp_path / "there").schemes == open_checkpoint(source).schemes
    assert torch.equal(logits(tmp_path / "there"), logits(source))


def test_linears_that_are_dense_stay_dense(say: Say, tmp_path: Path) -> None:
    source = compressed(tmp_path, "llama-gqa", "W4A16_G128")
    scheme = with_exceptions(SCHEMES["W4A16_G128"], {f"layers.{idx}.ffn.down": None for idx in range(2)})
    mixed = tmp_path / "mixed"
    mixed.mkdir()
    write_format("compressed-tensors", mixed, Rounded(Checkpoint(tmp_path / "source"), scheme), scheme)
    assert not torch.equal(logits(mixed), logits(source))
    for to in ("gptq", "awq"):
        assert say("convert", mixed, "--to", to, "--out", tmp_path / to)[0] == 0
        assert open_checkpoint(tmp_path / to).schemes == open_checkpoint(mixed).schemes
        assert torch.equal(logits(tmp_path / to), logits(mixed))


@pytest.mark.parametrize(
    ("scheme", "head", "to", "rule"),
    [
        ("W4A16_G128_ASYM", None, "gptq", "symmetric"),
        ("W8A16", None, "awq", "bits"),
        ("FP8_DYNAMIC", None, "gptq", "weight-only"),
        ("FP8_DYNAMIC", None, "awq", "weight-only"),
        ("W4A16_G128", "W8A16", "awq", "dense-head"),
        ("W4A16_G128", "W8A16", "gptq", "one-scheme"),
        ("W8A16", "W8A16", "gptq", "whole-words"),  # a vocabulary of 97
    ],
)
def test_what_a_format_cannot_say_is_refused_by_name_and_nothing_is_written(
    scheme: str, head: str | None, to: str, rule: str, say: Say, tmp_path: Path
) -> None:
    source = compressed(tmp_path, "llama-gqa", scheme, head=head)
    before = sorted(tmp_path.iterdir())
    code, out, err = say("convert", source, "--to", to, "--out", tmp_path / "there")
    assert (code, out) == (2, "")
    assert f"[{rule}]" in err
    assert sorted(tmp_path.iterdir()) == before


def test_scales_are_never_rounded_but_counted_and_refused(say: Say, tmp_path: Path) -> None:
    source = compressed(tmp_path, "llama-gqa", "W4A16_G128", dtype=torch.float32)
    scales = [
        value
        for name, value in load_file(source / "model.safetensors").items()
        if name.endswith("weight_scale")
    ]
    num_scales = sum(each.numel() for each in scales)
    num_changed = sum(int((each.half().float() != each).sum()) for each in scales)
    assert 0 < num_changed <= num_scales
    code, _, err = say("convert", source, "--to", "awq", "--out", tmp_path / "there")
    assert code == 2
    assert "[exact-scales]" in err
    assert f"{num_changed:,} would change" in err
    assert f"{num_scales:,} float32 scales" in err
    assert not (tmp_path / "there").exists()


def test_a_dense_model_has_nothing_to_convert(say: Say, tmp_path: Path) -> None:
    saved(tmp_path / "source", "llama", {})
    code, _, err = say("convert", tmp_path / "source", "--to", "gptq", "--out", tmp_path / "there")
    assert code == 2
    assert "dense" in err
    assert not (tmp_path / "there").exists()


def test_an_unknown_format_and_a_missing_source_are_usage_errors(say: Say, tmp_path: Path) -> None:
    source = compressed(tmp_path, "llama-gqa", "W4A16_G128")
    code, _, err = say("convert", source, "--to", "gptx", "--out", tmp_path / "there")
    assert code == 2
    assert "Did you mean 'gptq'?" in err
    assert say("convert", tmp_path / "nowhere", "--to", "gptq", "--out", tmp_path / "there")[0] == 2


def test_what_is_there_is_not_replaced(say: Say, tmp_path: Path) -> None:
    source = compressed(tmp_path, "llama-gqa", "W4A16_G128")
    before = content(source)
    code, _, err = say("convert", source, "--to", "gptq", "--out", source)
    assert code == 2
    assert "not an empty directory" in err
    assert content(source) == before
    (tmp_path / "empty").mkdir()
    assert say("convert", source, "--to", "gptq", "--out", tmp_path / "empty")[0] == 0


def test_a_disk_that_fails_leaves_nothing_half_written(
    say: Say, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = compressed(tmp_path, "llama-gqa", "W4A16_G128")
    before = sorted(tmp_path.iterdir())

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("compress.artifact.tensors.ShardWriter.finish", full)
    code, _, err = say("convert", source, "--to", "gptq", "--out", tmp_path / "there")
    assert code == 5
    assert "No space left" in err
    assert sorted(tmp_path.iterdir()) == before


# --------------------------------------------------------------------------------------------- made by others


def foreign(
    tmp_path: Path,
    method: str,
    said: dict[str, Any],
    *,
    dtype: torch.dtype = torch.float16,
    symmetric: bool = False,
) -> tuple[Path, Path]:
    """A checkpoint as another tool writes it, packed by numpy, and the dense checkpoint of what it means
    (float32).
    """
    saved(tmp_path / "plain", "llama", WHOLE_GROUPS, dtype=dtype)
    tensors = load_file(tmp_path / "plain" / "model.safetensors")
    meant = {}
    meant = {name: value.float() for name, value in tensors.items()}
    for seed, name in enumerate(f"model.layers.{idx}.{linear}" for idx in range(2) for linear in LINEARS):
        n_size, k_size = tensors.pop(f"{name}.weight").shape
        num_groups = k_size // said["group_size"]
        linear = packed_numpy.random_linear(
            n_size, k_size, num_groups=num_groups, seed=seed, least_zero=1, scale=k_size**-0.5 / 5
        )
        if symmetric:
            linear = Linear(linear.codes, linear.zeros * 0 + 8, linear.scales)
        packed = packed_numpy.gptq_packed(linear) if method == "gptq" else packed_numpy.awq_packed(linear)
        tensors |= {f"{name}.{leaf}": torch.from_numpy(array) for leaf, array in packed.items()}
        half = torch.from_numpy(linear.values()).to(
            torch.float16
        )  # rounded to the dtype of the scale, as consumers do
        meant[f"{name}.weight"] = half.float()
    config = json.loads((tmp_path / "plain" / "config.json").read_text())
    for place, values, changes in (
        (tmp_path / "foreign", tensors, {"quantization_config": {"quant_method": method, **said}}),
        (tmp_path / "meant", meant, {"dtype": "float32"}),
    ):
        place.mkdir()
        save_file(values, place / "model.safetensors", metadata={"format": "pt"})
        (place / "config.json").write_text(json.dumps({**config, **changes}))
    return tmp_path / "foreign", tmp_path / "meant"


AWQ = {"bits": 4, "group_size": 128, "zero_point": True, "version": "gemm", "modules_to_not_convert": None}
GPTQ = {
    "bits": 4,
    "group_size": 128,
    "desc_act": False,
    "sym": False,
    "damp_percent": 0.01,
    "static_groups": False,
}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    ("method", "said", "scheme"),
    [
        ("awq", AWQ, "W4A16_G128_ASYM"),
        ("gptq", GPTQ, "W4A16_G128_ASYM"),
        ("gptq", GPTQ | {"sym": True}, "W4A16_G128"),
    ],
)
@pytest.mark.one_in(3)
def test_a_checkpoint_of_another_tool_runs_as_what_it_means(
    method: str, said: dict[str, Any], scheme: str, dtype: torch.dtype, say: Say, tmp_path: Path
) -> None:
    theirs, meant = foreign(tmp_path, method, said, dtype=dtype, symmetric=SCHEMES[scheme].symmetric)
    assert set(open_checkpoint(theirs).schemes.values()) == {SCHEMES[scheme]}
    assert torch.equal(logits(theirs), logits(meant))
    code, _, err = say("convert", theirs, "--to", "compressed-tensors", "--out", tmp_path / "ours")
    assert code == 0, err
    assert "no tokenizer" in err
    assert torch.equal(logits(tmp_path / "ours"), logits(meant))
    code, _, err = say("convert", tmp_path / "ours", "--to", "awq", "--out", tmp_path / "again")
    assert code == 0, err
    if method == "awq":
        before, after = (load_file(path / "model.safetensors") for path in (theirs, tmp_path / "again"))
        assert before.keys() == after.keys()
        assert all(torch.equal(before[name], after[name]) for name in before)


def test_a_bias_of_zeros_beside_a_quantized_linear_is_passed_over_and_another_is_not(
    say: Say, tmp_path: Path
) -> None:
    theirs, meant = foreign(tmp_path, "gptq", GPTQ)
    tensors = load_file(theirs / "model.safetensors")
    name = "model.layers.0.self_attn.q_proj.bias"
    for value in (0.0, 0.5):
        save_file(
            tensors | {name: torch.full((128,), value)},
            theirs / "model.safetensors",
            metadata={"format": "pt"},
        )
        if not value:
            assert torch.equal(logits(theirs), logits(meant))
    code, _, err = say("convert", theirs, "--to", "awq", "--out", tmp_path / "ours")
    assert code == 2
    assert name in err


def test_activation_order_is_refused_naming_the_linear(say: Say, tmp_path: Path) -> None:
    theirs, _ = foreign(tmp_path, "gptq", GPTQ | {"desc_act": True})
    assert (
        say("convert", theirs, "--to", "awq", "--out", tmp_path / "in-order")[0] == 0
    )  # the tensors decide: these are in order
    tensors = load_file(theirs / "model.safetensors")
    name = "model.layers.1.mlp.down_proj"
    tensors[f"{name}.g_idx"] = tensors[f"{name}.g_idx"].flip(0)
    save_file(tensors, theirs / "model.safetensors", metadata={"format": "pt"})
    code, _, err = say("convert", theirs, "--to", "awq", "--out", tmp_path / "ours")
    assert code == 2
    assert name in err
    assert "activation order" in err
    assert not (tmp_path / "ours").exists()


def test_a_group_size_without_a_scheme_is_opened_and_refused_by_the_runtime(tmp_path: Path) -> None:
    theirs, _ = foreign(tmp_path, "awq", AWQ | {"group_size": 16})
    assert {scheme.name for scheme in open_checkpoint(theirs).schemes.values()} == {"W4A16_G16_ASYM"}
    with pytest.raises(EnvironmentUnfit, match="no linear kernel for scheme W4A16_G16_ASYM"):
        logits(theirs)


def test_a_quantized_source_is_not_quantized_again(say: Say, tmp_path: Path) -> None:
    theirs, _ = foreign(tmp_path, "awq", AWQ)
    Tokenizer(models.BPE()).save(str(theirs / "tokenizer.json"))
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        json.dumps(
            {
                "version": 1,
                "model": str(theirs),
                "stages": [{"kind": "calibrate", "seq_len": 16}, {"kind": "quantize"}],
            }
        )
    )
    code, _, err = say("plan", recipe)
    assert code == 2
    assert "quantized already (quant_method 'awq')" in err


# ---------------------------------------------------------------------------------------- FP8, made by others


def foreign_fp8(
    tmp_path: Path,
    said: dict[str, Any],
    *,
    scales: str,
    leaves: tuple[str, str],
    family: str = "llama",
    powers_of_two: bool = False,
    **changes: Any,
) -> tuple[Path, Path]:
    """A checkpoint of quant_method fp8 as another tool writes it, and the dense one that its weights mean
    (float32). Scales are float32, of every `block`, `channel` or `matrix`, stored as `leaves[0]`; static ones
    of inputs as `leaves[1]`.
    """
    saved(tmp_path / "plain", family, {**WHOLE_GROUPS, **changes}, dtype=torch.bfloat16)
    tensors = load_file(tmp_path / "plain" / "model.safetensors")
    meant = {name: value.float() for name, value in tensors.items()}
    generator = torch.Generator().manual_seed(3)
    modules = r"_proj(?:_qkv|_z|_qkvz|_with_mqa)?|\.attention\.dense|\.wq_b|\.wk|\.w[123]"
    linear = re.compile(rf"(.*\.layers\..*(?:{modules}))\.weight")
    for name in [found[1] for found in map(linear.fullmatch, tensors) if found]:
        n_size, k_size = tensors[f"{name}.weight"].shape
        codes = (torch.randn(n_size, k_size, generator=generator) * 100).to(torch.float8_e4m3fn)
        shape = {"block": (-(-n_size // 128), -(-k_size // 128)), "channel": (n_size, 1), "matrix": ()}[
            scales
        ]
        scale = (torch.rand(shape, generator=generator) + 0.5) * k_size**-0.5 / 100
        if powers_of_two:
            scale = torch.exp2(torch.round(torch.log2(scale)))
        whole = (
            scale.repeat_interleave(128, 0)[:n_size].repeat_interleave(128, 1)[:, :k_size]
            if scales == "block"
            else scale
        )
        tensors |= {f"{name}.weight": codes, f"{name}.{leaves[0]}": scale}
        if said["activation_scheme"] == "static":
            tensors[f"{name}.{leaves[1]}"] = torch.tensor(0.02)
        meant[f"{name}.weight"] = codes.float() * whole
    config = json.loads((tmp_path / "plain" / "config.json").read_text())
    for place, values, changed in (
        (tmp_path / "foreign", tensors, {"quantization_config": {"quant_method": "fp8", **said}}),
        (tmp_path / "meant", meant, {"dtype": "float32"}),
    ):
        place.mkdir()
        save_file(values, place / "model.safetensors", metadata={"format": "pt"})
        (place / "config.json").write_text(json.dumps({**config, **changed}))
    return tmp_path / "foreign", tmp_path / "meant"


BLOCKS = {"activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [128, 128]}
INV = ("weight_scale_inv", "activation_scale")
PLAIN = ("weight_scale", "input_scale")
FP8_CASES: dict[str, tuple[dict[str, Any], str, tuple[str, str], str]] = {
    "blocks": (BLOCKS, "block", INV, "FP8_BLOCK"),
    "matrix-dynamic": ({"activation_scheme": "dynamic"}, "matrix", PLAIN, "FP8_DYNAMIC"),
    "channel-dynamic": (
        {"activation_scheme": "dynamic", "weight_block_size": None},
        "channel",
        PLAIN,
        "FP8_DYNAMIC",
    ),
    "matrix-static": (
        {"activation_scheme": "static", "ignored_layers": ["re:.*lm_head"]},
        "matrix",
        PLAIN,
        "FP8_STATIC",
    ),
    "matrix-static-inv": (
        {"activation_scheme": "static", "weight_block_size": None},
        "matrix",
        INV,
        "FP8_STATIC",
    ),
}


def dense_logits(path: Path, quant: ActivationQuant | None = None) -> Tensor:
    """Of our decoder, with the inputs of the linears of layers rounded where `quant` is given."""
    decoder = build_decoder(open_checkpoint(path), dtype=torch.float32, device=torch.device("cpu"))

    def rounded(_: Any, inputs: tuple[Tensor, ...]) -> Tensor:
        return (
            quantize(inputs[0].flatten(0, -2), quant).dequantize(torch.float32).view(inputs[0].shape)
            if quant
            else inputs[0]
        )

    for name, module in decoder.named_modules():
        if isinstance(module, torch.nn.Linear) and name != "head":
            module.register_forward_pre_hook(rounded)
    with torch.inference_mode():
        return decoder(tokens(2, 24))


@pytest.mark.parametrize("case", FP8_CASES)
def test_an_fp8_checkpoint_of_another_tool_is_read_converted_and_served(
    case: str, say: Say, tmp_path: Path
) -> None:
    said, scales, leaves, scheme = FP8_CASES[case]
    ragged = {
        "intermediate_size": 192 if case == "matrix-static" else 256,
        "num_key_value_heads": 1,
    }  # k and v end within a block
    theirs, meant = foreign_fp8(tmp_path, said, scales=scales, leaves=leaves, **ragged)
    assert set(open_checkpoint(theirs).schemes.values()) == {SCHEMES[scheme]}
    assert torch.equal(dense_logits(theirs), dense_logits(meant))
    code, _, err = say("convert", theirs, "--to", "compressed-tensors", "--out", tmp_path / "ours")
    assert code == 0, err
    assert torch.equal(dense_logits(tmp_path / "ours"), dense_logits(meant))
    served = logits(theirs)
    assert torch.equal(served, logits(tmp_path / "ours"))
    static_scale = torch.tensor(0.02) if scheme == "FP8_STATIC" else None
    quant = ActivationQuant(static_scale, group_size=128 if scheme == "FP8_BLOCK" else None)
    exact = dense_logits(meant)
    rounded = dense_logits(meant, quant)
    # Sums in another order move an input over a tie now and then, and what follows it with it.
    assert (served - rounded).abs().median() < 1e-3 * (exact - rounded).abs().median()
    assert (served - rounded).abs().max() < (exact - rounded).abs().max()


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("qwen3_5_text", {}),
        ("qwen3_5_text", {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 384}),
        (
            "qwen3_next",
            {
                "num_experts": 3,
                "num_experts_per_tok": 2,
                "moe_intermediate_size": 128,
                "shared_expert_intermediate_size": 128,
            },
        ),
    ],
)
def test_blocks_of_heads_that_rotate_in_part_are_read_served_and_written_back_byte_for_byte(
    family: str, changes: dict[str, Any], say: Say, tmp_path: Path
) -> None:
    of_heads = {"head_dim": 256, "num_attention_heads": 4, "num_key_value_heads": 1, **changes}
    theirs, meant = foreign_fp8(
        tmp_path,
        BLOCKS,
        scales="block",
        leaves=INV,
        family=family,
        full_attention_interval=2,
        linear_num_key_heads=2,
        linear_num_value_heads=2,
        linear_key_head_dim=128,
        linear_value_head_dim=128,
        **of_heads,
    )
    opened = open_checkpoint(theirs)
    shape = opened.arch.layers[1]
    assert shape.leading_dim == shape.head_dim // 4
    exact = Checkpoint(meant)
    for idx in range(opened.arch.num_layers):
        expected = exact.layer(idx)
        for name, value in opened.layer(idx).items():
            quantized = name.removesuffix(".weight") in opened.arch.layers[idx].linears
            assert isinstance(value, QuantizedWeight) == quantized, name
            assert torch.equal(dense(value, torch.float32), expected[name].float()), name
    assert torch.equal(dense_logits(theirs), dense_logits(meant))
    served, in_16_bits = logits(theirs), logits(meant)
    assert 0 < (served - in_16_bits).square().mean().sqrt() < 0.2 * in_16_bits.square().mean().sqrt()
    for to, source in (("compressed-tensors", theirs), ("fp8", tmp_path / "compressed-tensors")):
        code, _, err = say("convert", source, "--to", to, "--out", tmp_path / to)
        assert code == 0, err
        assert torch.equal(logits(tmp_path / to), served)
    before, after = (load_file(path / "model.safetensors") for path in (theirs, tmp_path / "fp8"))
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        assert after[name].dtype == tensor.dtype
        assert torch.equal(after[name].view(torch.uint8), tensor.view(torch.uint8)), name


def test_blocks_go_to_fp8_and_back_byte_for_byte_and_transformers_reads_the_same_weights(
    say: Say, tmp_path: Path
) -> None:
    """On a CPU it decompresses them: the values are then bfloat16, which holds our own scales' products
    rounded once.
    """
    ours = compressed(tmp_path, "llama-all-biases", "FP8_BLOCK", num_key_value_heads=4)
    code, _, err = say("convert", ours, "--to", "fp8", "--out", tmp_path / "fp8")
    assert code == 0, err
    code, _, err = say("convert", tmp_path / "fp8", "--to", "compressed-tensors", "--out", tmp_path / "back")
    assert code == 0, err
    assert content(tmp_path / "back") == content(ours)
    assert torch.equal(logits(tmp_path / "fp8"), logits(ours))
    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "fp8", dtype=torch.bfloat16, output_loading_info=True
    )
    assert not any(
        info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs")
    ), info
    weights = dict(model.named_parameters())
    opened = open_checkpoint(tmp_path / "fp8")
    for idx in range(2):
        for name, value in opened.layer(idx).items():
            if isinstance(value, QuantizedWeight):
                assert torch.equal(
                    weights[
                        opened.family.to_disk(f"layers.{idx}.{name.removesuffix('.weight')}") + ".weight"
                    ],
                    value.dequantize(),
                )


def test_what_fp8_cannot_say_is_refused_by_name(say: Say, tmp_path: Path) -> None:
    for case, changes, rule in (
        ("ragged", {"scheme": "FP8_BLOCK", "num_key_value_heads": 1}, "whole-blocks"),
        ("head", {"scheme": "FP8_BLOCK", "num_key_value_heads": 4, "head": "FP8_DYNAMIC"}, "dense-head"),
        ("channels", {"scheme": "FP8_DYNAMIC"}, "blocks"),
    ):
        (tmp_path / case).mkdir()
        ours = compressed(tmp_path / case, "llama-gqa", **changes)
        code, _, err = say("convert", ours, "--to", "fp8", "--out", tmp_path / case / "fp8")
        assert (code, f"[{rule}]" in err) == (2, True), err
        assert not (tmp_path / case / "fp8").exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"weight_block_size": [64, 128]}, r"weight_block_size \[64, 128\]"),
        ({"activation_scheme": "static"}, "activation_scheme static"),
        ({"activation_scheme": None}, "activation_scheme None"),
        ({"fmt": "e5m2"}, "fmt e5m2"),
        ({"scale_fmt": "ue4m3"}, "scale_fmt ue4m3"),
        ({"kv_cache_scheme": "static"}, "kv_cache_scheme"),
        ({"modules_to_convert": ["model.embed_tokens"]}, "modules_to_convert"),
    ],
)
def test_fp8_that_would_be_computed_otherwise_is_refused(
    change: dict[str, Any], message: str, tmp_path: Path
) -> None:
    theirs, _ = foreign_fp8(tmp_path, BLOCKS, scales="block", leaves=INV)
    config = json.loads((theirs / "config.json").read_text())
    config["quantization_config"].update(change)
    (theirs / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedFormat, match=message):
        open_checkpoint(theirs)


@pytest.mark.parametrize(
    "said", ["model.layers.1.mlp", "re:.*layers.1.mlp.*", r"model\.layers\.1\.mlp\.\w+_proj", "layers.1"]
)
def test_a_linear_that_is_listed_as_dense_must_be_stored_so(said: str, tmp_path: Path) -> None:
    """The tensors decide whether the list was read as it was meant: nothing is passed over."""
    theirs, _ = foreign_fp8(tmp_path, BLOCKS, scales="block", leaves=INV)
    config = json.loads((theirs / "config.json").read_text())
    config["quantization_config"]["modules_to_not_convert"] = ["lm_head", said]
    (theirs / "config.json").write_text(json.dumps(config))
    if said == "layers.1":  # neither from the start nor to the end of a name
        assert len(open_checkpoint(theirs).schemes) == 14
        return
    with pytest.raises(UnsupportedArch, match=r"layers\.1\.mlp\..*weight_scale_inv"):
        open_checkpoint(theirs)
    tensors = load_file(theirs / "model.safetensors")
    for name in [each for each in tensors if "layers.1.mlp" in each]:
        tensors[name] = tensors[name].to(torch.bfloat16)
        if name.endswith("scale_inv"):
            del tensors[name]
    save_file(tensors, theirs / "model.safetensors", metadata={"format": "pt"})
    assert set(open_checkpoint(theirs).schemes) == {
        f"layers.{idx}.{name}"
        for idx, names in (
            (0, ("attn.q", "attn.k", "attn.v", "attn.o", "ffn.gate", "ffn.up", "ffn.down")),
            (1, ("attn.q", "attn.k", "attn.v", "attn.o")),
        )
        for name in names
    }
