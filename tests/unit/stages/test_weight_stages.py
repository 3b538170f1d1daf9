"""The stages calibrate, quantize and export, run by hand into a workspace: what each reads, writes, refuses,
and how a stopped one resumes.
"""

import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

from compress.artifact.manifest import Artifact, open_artifact
from compress.artifact.workspace import Workspace
from compress.context import Context
from compress.data.model_tokens import TOKENS_NAME
from compress.data.tokens import load_token_set
from compress.errors import Interrupted, UnsupportedArch, UnsupportedFormat, UsageError
from compress.export import open_checkpoint, open_weights
from compress.export.conversion import convert
from compress.models.canonical import CanonicalStore
from compress.models.checkpoint import Checkpoint
from compress.models.weights import dense
from compress.quant.numerics import nearest_weight
from compress.quant.scheme import SCHEMES, QuantizedWeight
from compress.registry.model_source import ModelSource, resolve_model
from compress.stages import STAGES, Input, Inputs, PlanFacts, Port
from compress.stages.calibrate import Calibrate
from compress.stages.export import Export
from compress.stages.quantize.schemes import model_scheme
from compress.stages.quantize.spec import Quantize
from tests.support.tiny_decoder import QWEN3, tiny_arch, tiny_checkpoint

VOCAB = 300
TEXT = "\n\n".join(
    f"Sentence {idx} of the calibration text says that {idx * idx} is a square." for idx in range(400)
)
W8 = Quantize.model_validate({"scheme": "W8A16", "smooth": {"kind": "awq", "num_ratios": 3}})
SPECS: dict[str, Any] = {
    "calibrate": Calibrate(num_samples=6, seq_len=16),
    "quantize": W8,
    "export": Export(),
}


def byte_tokenizer(*, bos: bool) -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {"<s>": 0, **{symbol: idx + 1 for idx, symbol in enumerate(alphabet)}}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    if bos:
        tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return tokenizer


def model(directory: Path, *, bos: bool = False, **changes: Any) -> ModelSource:
    tiny_checkpoint(
        directory, tiny_arch(QWEN3, vocab_size=VOCAB, bos_token_id=0, **{"dtype": "bfloat16", **changes})
    )
    byte_tokenizer(bos=bos).save(str(directory / "tokenizer.json"))
    (directory / "generation_config.json").write_text('{"eos_token_id": 2}')
    return resolve_model("path", str(directory), None)


def card(directory: Path) -> str:
    (directory / "text.txt").write_text(TEXT)
    path = directory / "card.yaml"
    path.write_text(
        "title: squares\nlicense: CC0-1.0\nsource: made up\nkind: local\nformat: txt\npaths: [text.txt]\n"
    )
    return str(path)


class Bench:
    """One workspace and one model, and the artifacts made so far by port."""

    def __init__(self, root: Path, source: ModelSource) -> None:
        self.workspace = Workspace(root / "workspace")
        self.source = source
        self.ports = {
            Port.DENSE: Input(source.path, source.digest),
            Port.SOURCE: Input(source.path, source.digest),
        }

    def run(self, kind: str, spec: Any, **context: Any) -> Artifact:
        stage = STAGES.get(kind)
        key = Workspace.key(
            kind,
            stage.version,
            spec.model_dump(mode="json"),
            {str(port): each.digest for port, each in self.ports.items()},
            0,
        )
        ctx = Context("cpu", 0, self.workspace.scratch(key), **context)
        inputs = Inputs(self.source, dict(self.ports))
        artifact = self.workspace.commit(key, kind, {}, lambda out: stage.run(spec, inputs, out, ctx))
        self.ports[stage.gives] = Input(artifact.path, artifact.digest)
        return artifact


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path, model(tmp_path / "model"))


def calibrated(bench: Bench, tmp_path: Path) -> Artifact:
    return bench.run("calibrate", Calibrate(data=card(tmp_path), num_samples=6, seq_len=16))


def test_calibration_text_becomes_windows_of_the_models_own_tokens(bench: Bench, tmp_path: Path) -> None:
    artifact = calibrated(bench, tmp_path)
    tokens_NS = load_token_set(artifact.path / TOKENS_NAME).tokens_NS
    assert tokens_NS.shape == (6, 16)
    for row in tokens_NS.tolist():
        assert all(line in TEXT for line in byte_tokenizer(bos=False).decode(row).split("\n"))
    assert artifact.manifest.role == "calibration"
    assert artifact.manifest.facts["seq_len"] == 16
    assert artifact.manifest.facts["tokenizer_digest"].startswith("sha256:")


def test_a_tokenizer_that_begins_text_with_bos_begins_the_windows_with_it(tmp_path: Path) -> None:
    bench = Bench(tmp_path, model(tmp_path / "model", bos=True))
    tokens_NS = load_token_set(calibrated(bench, tmp_path).path / TOKENS_NAME).tokens_NS
    assert tokens_NS[:, 0].tolist() == [0] * 6
    assert (tokens_NS[:, 1:] > 0).all()


def test_a_model_goes_through_to_a_checkpoint_that_opens_with_the_same_codes(
    bench: Bench, tmp_path: Path
) -> None:
    calibrated(bench, tmp_path)
    quantized = bench.run("quantize", W8)
    store = open_weights(quantized.path)
    assert isinstance(store, CanonicalStore)
    assert len(quantized.manifest.facts["layers"]) == 3 * 7
    assert [layer["scheme"] for layer in quantized.manifest.layers] == ["W8A16"] * 3
    exported = bench.run("export", Export())
    opened = open_checkpoint(exported.path)
    for idx in range(3):
        found = opened.layer(idx)
        expected = store.layer(idx)
        assert found.keys() == expected.keys()
        assert sum(isinstance(value, QuantizedWeight) for value in found.values()) == 7
        assert all(torch.equal(dense(found[name]), dense(value)) for name, value in expected.items())
    assert (exported.path / "tokenizer.json").read_bytes() == (
        bench.source.path / "tokenizer.json"
    ).read_bytes()
    assert (exported.path / "generation_config.json").exists()
    assert exported.manifest.scheme == quantized.manifest.scheme
    for idx in range(3):  # what is not a linear is as the source had it, or was smoothed
        original = Checkpoint(bench.source.path).layer(idx)
        assert all(
            torch.equal(dense(opened.layer(idx)[name]), dense(original[name]))
            for name in ("attn.q_norm.weight", "attn.k_norm.weight")
        )


def test_refined_codes_are_stored_and_the_artifact_says_how_they_came_to_be(tmp_path: Path) -> None:
    source = model(tmp_path / "model")
    rtn = {
        "preset": "balanced",
        "round": {"kind": "rtn"},
        "true_sequential": False,
    }  # whose target leaves the first layer as it is
    spec = Quantize.model_validate({"scheme": "W8A16", **rtn})
    found = {}
    for name, each in (("plain", spec.model_copy(update={"refine": None})), ("refined", spec)):
        bench = Bench(tmp_path / name, source)
        (tmp_path / name).mkdir()
        calibrated(bench, tmp_path / name)
        found[name] = bench.run("quantize", each)
        assert found[name].manifest.facts["method"] == each.method()
    plain, refined = (
        [row for row in artifact.manifest.facts["layers"] if row["layer"] == 0] for artifact in found.values()
    )
    for before, after in zip(
        plain, refined, strict=True
    ):  # of the first layer, whose inputs are the same in both
        assert after["error_after"] < before["error_after"] == pytest.approx(before["error_before"])
        assert after["codes_moved"] > 0
    assert "preset" not in str(found["refined"].manifest.facts)
    stores = [open_weights(artifact.path).layer(2) for artifact in found.values()]
    assert any(not torch.equal(dense(stores[0][name]), dense(stores[1][name])) for name in stores[0])


def test_a_stopped_stage_resumes_to_the_same_artifact(tmp_path: Path) -> None:
    source = model(tmp_path / "model")
    digests = []
    for name in ("stopped", "undisturbed"):
        bench = Bench(tmp_path / name, source)
        (tmp_path / name).mkdir(exist_ok=True)
        calibrated(bench, tmp_path / name)
        if name == "stopped":
            calls = iter([None, None])
            with pytest.raises(Interrupted):
                bench.run("quantize", W8, stop_signal=lambda calls=calls: next(calls, signal.SIGINT))
        digests.append({record.path: record.digest for record in bench.run("quantize", W8).manifest.files})
    assert digests[0] == digests[1]


def test_a_scheme_that_does_not_fit_is_refused_before_any_work(bench: Bench, tmp_path: Path) -> None:
    calibrated(bench, tmp_path)
    with pytest.raises(UsageError, match="multiple of 128"):
        bench.run("quantize", Quantize(scheme="W4A16_G128"))
    assert not list(bench.workspace.root.glob("scratch/*/layer-*"))


def test_a_dtype_in_which_no_scale_can_be_stored_is_refused(tmp_path: Path) -> None:
    source = model(tmp_path / "model")
    config = source.path / "config.json"
    config.write_text(config.read_text().replace('"bfloat16"', '"float64"'))
    bench = Bench(tmp_path, source)
    calibrated(bench, tmp_path)
    with pytest.raises(UnsupportedFormat, match="float64"):
        bench.run("quantize", W8)


def test_options_of_methods_reach_the_cache_key() -> None:
    specs = [
        W8,
        Quantize.model_validate({"scheme": "W8A16"}),
        Quantize.model_validate({"scheme": "W8A16", "round": {"kind": "gptq", "damping": 0.02}}),
        Quantize.model_validate({"scheme": "W8A16", "round": {"kind": "rtn"}}),
        Quantize.model_validate({"scheme": "W8A16", "round": {"kind": "rtn", "scale": "mse"}}),
        Quantize.model_validate({"scheme": "W8A16", "refine": {"kind": "descent"}}),
        Quantize.model_validate({"scheme": "W8A16", "refine": {"kind": "descent", "sweeps": 2}}),
    ]
    dumps = [str(spec.model_dump(mode="json")) for spec in specs]
    assert len(set(dumps)) == len(specs)
    assert all(Quantize.model_validate(spec.model_dump(mode="json")) == spec for spec in specs)


def test_unknown_names_are_refused_when_the_spec_is_read() -> None:
    with pytest.raises(ValueError, match="W4A16_G128"):
        Quantize(scheme="W4A16_G12")
    with pytest.raises(ValueError, match="compressed-tensors"):
        Export(formats=("compressed-tensor",))
    with pytest.raises(ValueError, match="gptq"):
        Quantize.model_validate({"round": {"kind": "obq"}})


def test_a_format_may_be_named_without_a_list() -> None:
    named = Export.model_validate_json('{"formats": "gptq"}', strict=True)
    assert named == Export.model_validate_json('{"formats": ["gptq"]}', strict=True)
    assert named.model_dump(mode="json") == {"formats": ["gptq"]}
    for formats in ((), ("gptq", "gptq")):
        with pytest.raises(ValueError, match="once, and at least one"):
            Export(formats=formats)


@pytest.mark.parametrize("kind", SPECS)
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_estimates_grow_with_the_work(kind: str, device: str) -> None:
    def estimate(**changes: Any) -> Any:
        arch = tiny_arch(QWEN3, vocab_size=VOCAB, **changes)
        return STAGES.get(kind).estimate(SPECS[kind], PlanFacts(arch, device, SPECS))

    small = estimate()
    deep = estimate(num_hidden_layers=6)
    assert small.peak_bytes > 0
    assert small.disk_bytes > 0
    assert deep.disk_bytes >= small.disk_bytes
    assert deep.flops >= small.flops
    if kind == "quantize":
        assert deep.flops == pytest.approx(2 * small.flops)
        assert deep.peak_bytes == small.peak_bytes  # one layer at a time
    if kind != "calibrate":
        assert deep.disk_bytes > small.disk_bytes


def test_the_disk_estimate_of_an_export_is_what_it_writes(bench: Bench, tmp_path: Path) -> None:
    calibrated(bench, tmp_path)
    bench.run("quantize", W8)
    exported = bench.run("export", Export())
    facts = PlanFacts(Checkpoint(bench.source.path).arch, "cpu", SPECS)
    tensors = sum(
        record.size_bytes for record in exported.manifest.files if record.path.endswith(".safetensors")
    )
    assert STAGES.get("export").estimate(Export(), facts).disk_bytes == pytest.approx(
        tensors, rel=0.2
    )  # norms, biases, headers


@pytest.mark.parametrize(
    ("scheme", "head"), [("W8A16", "FP8_DYNAMIC"), ("FP8_DYNAMIC", "FP8_DYNAMIC"), ("FP8_STATIC", "W8A16")]
)
def test_a_head_in_its_own_scheme_goes_through_to_the_checkpoint(
    scheme: str, head: str, bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("compress.stages.quantize.HEAD_ROWS", 7)  # the vocabulary is not one block
    calibrated(bench, tmp_path)
    spec = Quantize.model_validate({"scheme": scheme, "head": head, "round": {"kind": "rtn"}})
    quantized = bench.run("quantize", spec)
    exported = bench.run("export", Export())
    assert (
        exported.manifest.scheme
        == quantized.manifest.scheme
        == model_scheme(spec, Checkpoint(bench.source.path).arch).to_json()
    )
    opened = open_checkpoint(exported.path)
    source = Checkpoint(bench.source.path)
    assert {name: found.name for name, found in opened.schemes.items() if name == "head"} == {"head": head}
    for store in (open_weights(quantized.path), opened):
        found = store.outer()
        original = source.outer()
        coded = found.pop("head.weight")
        assert isinstance(coded, QuantizedWeight)
        alone = nearest_weight(dense(original.pop("head.weight")), SCHEMES[head], torch.bfloat16)
        assert torch.equal(coded.dequantize(), alone.dequantize())
        assert all(torch.equal(dense(found[name]), dense(value)) for name, value in original.items())
    facts = PlanFacts(source.arch, "cpu", {**SPECS, "quantize": spec})
    tensors = sum(
        record.size_bytes for record in exported.manifest.files if record.path.endswith(".safetensors")
    )
    assert STAGES.get("export").estimate(Export(), facts).disk_bytes == pytest.approx(tensors, rel=0.2)


def test_the_head_of_a_model_that_ties_it_is_not_quantized(tmp_path: Path) -> None:
    bench = Bench(tmp_path, model(tmp_path / "model", tie_word_embeddings=True))
    calibrated(bench, tmp_path)
    spec = Quantize.model_validate({"scheme": "W8A16", "head": "FP8_DYNAMIC"})
    with pytest.raises(UnsupportedFormat, match="tied to its embedding"):
        bench.run("quantize", spec)
    with pytest.raises(UnsupportedFormat, match="tied to its embedding"):
        STAGES.get("quantize").estimate(spec, PlanFacts(Checkpoint(bench.source.path).arch, "cpu", SPECS))


def with_cache(name: str) -> Quantize:
    return Quantize.model_validate({"scheme": "W8A16", "round": {"kind": "rtn"}, "kv_cache": name})


def test_calibrated_cache_scales_go_through_to_the_checkpoint_and_back(bench: Bench, tmp_path: Path) -> None:
    calibrated(bench, tmp_path)
    quantized = bench.run("quantize", with_cache("fp8"))
    store = open_weights(quantized.path)
    opened = open_weights(bench.run("export", Export()).path)
    assert store.kv_format == opened.kv_format == "FP8_STATIC"
    for idx in range(3):
        for name in ("attn.k_scale", "attn.v_scale"):
            found = dense(opened.layer(idx)[name])
            expected = dense(store.layer(idx)[name])
            assert (found.dtype, found.shape) == (torch.float32, ())
            assert found == expected
    on_disk = load_file(bench.ports[Port.CHECKPOINT].path / "model.safetensors")[
        "model.layers.2.self_attn.v_scale"
    ]
    assert (on_disk.dtype, on_disk.shape) == (torch.float32, (1,))
    facts = quantized.manifest.facts["kv_cache"]
    assert [(row["layer"], row["cache"]) for row in facts["layers"]] == [
        (idx, name) for idx in range(3) for name in "kv"
    ]
    assert facts["warning"] is None
    assert all("linear" in row for row in quantized.manifest.facts["layers"])
    again = convert(
        resolve_model("path", str(quantized.path), None), "compressed-tensors", tmp_path / "again"
    )
    assert open_weights(again.path).kv_format == "FP8_STATIC"
    exported = {
        each.name: each.digest for each in open_artifact(bench.ports[Port.CHECKPOINT].path).manifest.tensors
    }
    assert {each.name: each.digest for each in again.manifest.tensors} == exported


@pytest.mark.parametrize(
    ("name", "kv_format"),
    [
        ("fp8_token_head", "FP8_TOKEN_HEAD"),
        ("fp8_attention", "FP8_ATTENTION"),
        ("int8", "INT8_TOKEN_HEAD"),
        ("int4", "INT4_TOKEN_HEAD"),
        ("int4_hadamard", "INT4_TOKEN_HEAD_HADAMARD"),
    ],
)
def test_a_cache_that_needs_no_scales_is_stated_by_the_manifest_alone(
    bench: Bench, tmp_path: Path, name: str, kv_format: str
) -> None:
    calibrated(bench, tmp_path)
    plain = bench.run("quantize", Quantize.model_validate({"scheme": "W8A16", "round": {"kind": "rtn"}}))
    assert "kv_cache" not in plain.manifest.facts
    quantized = bench.run("quantize", with_cache(name))
    assert [each.digest for each in quantized.manifest.tensors] == [
        each.digest for each in plain.manifest.tensors
    ]
    exported = bench.run("export", Export()).path
    assert open_weights(quantized.path).kv_format == open_weights(exported).kv_format == kv_format
    assert open_checkpoint(exported).kv_format is None
    (exported / "compress.json").unlink()
    assert open_weights(exported).kv_format is None


def test_formats_without_a_place_for_cache_scales_refuse_them_by_name(bench: Bench, tmp_path: Path) -> None:
    calibrated(bench, tmp_path)
    quantized = bench.run("quantize", with_cache("fp8"))
    for name in ("gptq", "awq"):
        with pytest.raises(UnsupportedFormat, match=r"\[kv-scales\]"):
            convert(resolve_model("path", str(quantized.path), None), name, tmp_path / name)
    facts = PlanFacts(open_weights(quantized.path).arch, "cpu", {"quantize": with_cache("fp8")})
    with pytest.raises(UnsupportedFormat, match=r"\[kv-scales\]"):
        STAGES.get("export").estimate(Export(formats=("gptq",)), facts)


@pytest.mark.parametrize(
    ("value", "error", "words"),
    [
        (None, UnsupportedArch, "lacks the tensor 'model.layers.1.self_attn.k_scale'"),
        (torch.zeros(1), UnsupportedFormat, "not one positive number"),
        (torch.tensor([float("nan")]), UnsupportedFormat, "not one positive number"),
        (torch.ones(2, 1, 1), UnsupportedFormat, "not one positive number"),
        (torch.tensor(0.25, dtype=torch.bfloat16), None, ""),
    ],
)
def test_cache_scales_of_other_programs_are_read_with_care(
    bench: Bench, tmp_path: Path, value: torch.Tensor | None, error: type[Exception] | None, words: str
) -> None:
    calibrated(bench, tmp_path)
    bench.run("quantize", with_cache("fp8"))
    foreign = tmp_path / "foreign"
    shutil.copytree(bench.run("export", Export()).path, foreign)
    (foreign / "compress.json").unlink()
    tensors = load_file(foreign / "model.safetensors")
    del tensors["model.layers.1.self_attn.k_scale"]
    if value is not None:
        tensors["model.layers.1.self_attn.k_scale"] = value
    save_file(tensors, foreign / "model.safetensors")
    if error is None:
        assert dense(open_weights(foreign).layer(1)["attn.k_scale"]) == torch.tensor(0.25)
        return
    with pytest.raises(error, match=words):
        open_weights(foreign).layer(1)


def test_the_plan_says_which_cache_and_how_large(bench: Bench) -> None:
    facts = PlanFacts(open_weights(bench.source.path).arch, "cpu", {"quantize": with_cache("int8")})
    assert any(
        "INT8_TOKEN_HEAD" in note for note in STAGES.get("quantize").estimate(with_cache("int8"), facts).notes
    )
    assert any(
        "--kv-cache-dtype int8_per_token_head" in note
        for note in STAGES.get("export").estimate(Export(), facts).notes
    )
