"""Quantizing without activations: the codes of the path that observes every layer, with no forward pass and
no calibration text.
"""

import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import compress.calibrate.data_free as data_free
import compress.calibrate.layer_run as layer_run
from compress.artifact.writer import ArtifactWriter
from compress.calibrate.layer_files import check_finite
from compress.context import Context, OneRank
from compress.data.model_tokens import TOKENS_NAME
from compress.data.tokens import TokenSet, save_token_set
from compress.errors import Interrupted, UnsupportedFormat
from compress.models.checkpoint import Checkpoint
from compress.models.family import family_of
from compress.models.known import known_config
from compress.registry.model_source import ModelSource
from compress.stages import STAGES, Input, Inputs, PlanFacts, Port
from compress.stages.calibrate import Calibrate
from compress.stages.quantize.layers import quantize_layers
from compress.stages.quantize.spec import Quantize
from tests.support.stop_after import StopAfter
from tests.support.tiny_decoder import LLAMA, tiny_arch, tiny_checkpoint, tiny_tokens

NUM_LAYERS = 3
SHAPE = {  # widths that 128 divides, for scale groups and blocks; 320 rows of the FFN are not whole blocks
    "vocab_size": 300,
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_attention_heads": 5,
    "num_key_value_heads": 1,
    "head_dim": 128,
    "dtype": "bfloat16",
}
RTN = {"kind": "rtn"}
SPECS: dict[str, dict[str, Any]] = {
    "FP8_DYNAMIC": {"scheme": "FP8_DYNAMIC"},
    "FP8_BLOCK": {"scheme": "FP8_BLOCK"},
    "INT8_DYNAMIC": {"scheme": "INT8_DYNAMIC"},
    "W4A16_G128": {"scheme": "W4A16_G128"},
    "asymmetric, searched": {"scheme": "W4A16_G32_ASYM", "round": {"kind": "rtn", "scale": "mse"}},
    "blocks, searched": {"scheme": "FP8_BLOCK", "round": {"kind": "rtn", "scale": "mse"}},
    "overrides": {
        "scheme": "FP8_DYNAMIC",
        "overrides": {"layers.0.*": "dense", "*.ffn.down": "W8A16", "layers.2.attn.o": "W4A16_G64"},
    },
    "some linears": {"scheme": "dense", "overrides": {"*.ffn.gate": "W8A16", "*.ffn.up": "W8A16"}},
    "head": {"scheme": "INT8_DYNAMIC", "head": "FP8_DYNAMIC"},
    "KV cache": {"scheme": "W8A16", "kv_cache": "fp8_token_head"},
    "true sequential": {"scheme": "W8A16", "true_sequential": True},
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("data-free") / "model", tiny_arch(LLAMA, **SHAPE))


def parsed(raw: dict[str, Any], **changes: Any) -> Quantize:
    return Quantize.model_validate({"round": RTN, **raw, **changes})


def inputs_of(model: Path, tokens: Path | None = None) -> Inputs:
    ports = {Port.DENSE: Input(model, "")}
    if tokens is not None:
        ports[Port.CALIB] = Input(tokens, "")
    return Inputs(ModelSource(model, "tiny", None, ""), ports)


def quantize(spec: Quantize, inputs: Inputs, root: Path, **context: Any) -> ArtifactWriter:
    """Run the stage into `root`; what it left there before are resume points."""
    for name in ("scratch", "out"):
        (root / name).mkdir(parents=True, exist_ok=True)
    out = ArtifactWriter(root / "out")
    STAGES.get("quantize").run(spec, inputs, out, Context("cpu", 0, root / "scratch", **context))
    return out


def contents(out: ArtifactWriter) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in out.path.iterdir()}


def no_layer(*args: object, **settings: object) -> None:
    raise AssertionError("a layer ran")


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.one_in(4)
def test_codes_are_those_of_the_observed_path_and_no_layer_runs(
    name: str, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arch = tiny_arch(LLAMA, **SHAPE)
    tokens = tmp_path / "tokens"
    tokens.mkdir()
    save_token_set(TokenSet(tiny_tokens(arch, 3, 13), 0, 0, {}), tokens / TOKENS_NAME)
    observed = quantize(
        parsed(SPECS[name], measure_error=True), inputs_of(model, tokens), tmp_path / "observed"
    )
    monkeypatch.setattr(layer_run, "build_layer", no_layer)
    found = quantize(parsed(SPECS[name]), inputs_of(model), tmp_path / "free")
    assert contents(found) == contents(observed)
    assert found.description is not None
    assert observed.description is not None
    facts, facts_observed = found.description["facts"], observed.description["facts"]
    assert facts.pop("data_free") is True
    assert "layers" not in facts
    assert all("error_after" in row for row in facts_observed.pop("layers"))
    assert facts == facts_observed
    assert {**found.description, "facts": None} == {**observed.description, "facts": None}


def test_measuring_errors_runs_the_layers(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layer_run, "build_layer", no_layer)
    save_token_set(TokenSet(tiny_tokens(tiny_arch(LLAMA, **SHAPE), 3, 13), 0, 0, {}), tmp_path / TOKENS_NAME)
    for name in ("W4A16_G128", "true sequential"):
        with pytest.raises(AssertionError, match="a layer ran"):
            quantize(parsed(SPECS[name], measure_error=True), inputs_of(model, tmp_path), tmp_path / name)


def test_a_cache_alone_leaves_every_weight_and_runs_no_layer(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layer_run, "build_layer", no_layer)
    spec = Quantize(scheme="dense", kv_cache="int8")
    out = quantize(spec, inputs_of(model), tmp_path)
    stored = load_file(out.path / "layer-00001.safetensors")
    dense = load_file(model / "model.safetensors")
    assert torch.equal(stored["ffn.down.weight"], dense["model.layers.1.mlp.down_proj.weight"])


@pytest.mark.slow
def test_how_many_rows_are_rounded_at_once_changes_no_bit(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("FP8_BLOCK", "asymmetric, searched"):
        found = []
        for piece in (5000, 20000, 1 << 30):
            monkeypatch.setattr("compress.methods.quantize.passes.CPU_PIECE", piece)
            found.append(
                contents(quantize(parsed(SPECS[name]), inputs_of(model), tmp_path / f"{name}{piece}"))
            )
        assert found[0] == found[1] == found[2]


@pytest.mark.parametrize("stop_after", [0, 1, 2])
def test_a_stopped_run_resumes_to_the_same_bytes_without_rounding_a_stored_layer_again(
    stop_after: int, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = parsed(SPECS["W4A16_G128"])
    with pytest.raises(Interrupted) as stopped:
        quantize(spec, inputs_of(model), tmp_path / "stopped", stop_signal=StopAfter(stop_after))
    assert stopped.value.exit_code == 128 + signal.SIGTERM
    scratch = tmp_path / "stopped" / "scratch"
    stored = {path: path.stat().st_mtime_ns for path in scratch.glob("layer-*.safetensors")}
    assert len(stored) == stop_after
    resumed = contents(quantize(spec, inputs_of(model), tmp_path / "stopped"))
    assert all(path.stat().st_mtime_ns == time for path, time in stored.items())
    assert resumed == contents(quantize(spec, inputs_of(model), tmp_path / "undisturbed"))


def test_a_run_whose_layers_are_all_stored_reads_none_of_them(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = parsed(SPECS["INT8_DYNAMIC"])
    first = contents(quantize(spec, inputs_of(model), tmp_path))
    for path in (tmp_path / "out").iterdir():
        path.unlink()
    monkeypatch.setattr(Checkpoint, "layer", no_layer)
    assert contents(quantize(spec, inputs_of(model), tmp_path)) == first


@pytest.mark.parametrize("failing", [0, 1])
def test_a_layer_that_cannot_be_written_ends_the_run_and_the_next_one_heals_it(
    failing: int, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = parsed(SPECS["FP8_BLOCK"])
    store = data_free.store_layer

    def full(out: Path, idx: int, *args: Any) -> None:
        if idx == failing:
            raise OSError(28, "No space left on device")
        store(out, idx, *args)

    monkeypatch.setattr(data_free, "store_layer", full)
    with pytest.raises(OSError, match="No space left"):
        quantize(spec, inputs_of(model), tmp_path / "full")
    monkeypatch.undo()
    damaged = tmp_path / "full" / "scratch" / "layer-00000.safetensors"
    if damaged.exists():
        damaged.write_bytes(damaged.read_bytes()[:-1] + b"x")
    healed = contents(quantize(spec, inputs_of(model), tmp_path / "full"))
    assert healed == contents(quantize(spec, inputs_of(model), tmp_path / "undisturbed"))


def test_other_ranks_leave_the_work_to_rank_0(model: Path, tmp_path: Path) -> None:
    class Second(OneRank):
        rank = 1
        size = 2

    ctx = Context("cpu", 0, tmp_path, ranks=Second())
    scheme, facts, rows = quantize_layers(parsed(SPECS["overrides"]), inputs_of(model), ctx)
    assert scheme is not None
    assert (facts, rows, list(tmp_path.iterdir())) == ({}, [], [])


@pytest.mark.parametrize(
    ("raw", "needs"),
    [
        *((raw, False) for raw in SPECS.values()),
        ({"scheme": "dense", "kv_cache": "int4"}, False),
        ({"scheme": "dense", "kv_cache": "fp8"}, True),
        ({"scheme": "W8A16", "round": {"kind": "gptq"}}, True),
        ({"scheme": "W8A16", "round": {"kind": "rtn", "scale": "hessian"}}, True),
        ({"scheme": "W8A16", "preset": "fast"}, True),
        ({"scheme": "W8A16", "round": RTN, "smooth": {"kind": "awq"}}, True),
        ({"scheme": "W8A16", "round": RTN, "target": {"kind": "gptaq"}}, True),
        ({"scheme": "W8A16", "round": RTN, "refine": {"kind": "descent"}}, True),
        ({"scheme": "W8A16", "round": RTN, "guide": {"kind": "gradients"}}, True),
        ({"scheme": "W8A16", "round": RTN, "tune": {"kind": "scales"}}, True),
        ({"scheme": "W8A16", "round": RTN, "kv_cache": "fp8"}, True),
        ({"scheme": "W8A16", "round": RTN, "measure_error": True}, True),
        ({"scheme": "FP8_STATIC", "round": RTN}, True),
        ({"scheme": "W8A16", "round": RTN, "overrides": {"*.ffn.down": "FP8_STATIC"}}, True),
        (
            {
                "scheme": {
                    "kind": "mixed",
                    "schemes": ["W8A16", "FP8_DYNAMIC"],
                    "budget": {"size_ratio": 0.6},
                },
                "round": RTN,
            },
            True,
        ),
    ],
    ids=str,
)
def test_calibration_text_is_taken_where_something_depends_on_activations(
    raw: dict[str, Any], needs: bool
) -> None:
    only_cache = raw.get("scheme") == "dense" and "overrides" not in raw
    spec = Quantize.model_validate(raw) if only_cache or "preset" in raw else parsed(raw)
    assert spec.needs_activations == needs
    assert (Port.CALIB in STAGES.get("quantize").needs(spec)) == needs
    assert Port.DENSE in STAGES.get("quantize").needs(spec)


def test_error_measurement_without_a_weight_to_round_is_refused() -> None:
    with pytest.raises(ValueError, match="leave out measure_error"):
        Quantize(scheme="dense", kv_cache="int8", measure_error=True)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("place", [0, 1234, 4095])
def test_numbers_that_are_not_finite_are_found_wherever_they_are(
    value: float, dtype: torch.dtype, place: int
) -> None:
    weight_OI = torch.randn(64, 64, generator=torch.Generator().manual_seed(0)).to(dtype)
    check_finite({"w": weight_OI}, "layers.0")
    weight_OI.view(-1)[place] = value
    with pytest.raises(UnsupportedFormat, match=r"layers\.0\.w"):
        check_finite({"w": weight_OI}, "layers.0")


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_plan_follows_the_bytes_and_needs_the_memory_of_a_layer_or_two(device: str) -> None:
    config = known_config("llama-3.1-8b")
    assert config is not None
    arch = family_of(config).read_config(config)
    stage = STAGES.get("quantize")
    facts = PlanFacts(arch, device, {"calibrate": Calibrate()})
    planned = stage.estimate(parsed(SPECS["FP8_DYNAMIC"]), facts)
    outer_bytes = 2 * 2 * arch.vocab_size * arch.hidden_size
    assert planned.flops == planned.num_launches == 0
    assert planned.moved_bytes == pytest.approx(2 * arch.num_params + planned.disk_bytes, rel=0.01)
    assert planned.disk_bytes == pytest.approx(arch.num_params + outer_bytes / 2, rel=0.01)
    assert planned.peak_bytes < outer_bytes + 3 * 2 * arch.num_linear_params / arch.num_layers
    observed = stage.estimate(parsed(SPECS["FP8_DYNAMIC"], measure_error=True), facts)
    assert observed.flops > 0 == observed.moved_bytes
