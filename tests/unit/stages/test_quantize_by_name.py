"""Quantizing by tensor name: codes are those of rounding to nearest, everything else passes through, shards
are resume points, and what cannot be right is refused."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from compress.artifact.tensors import (
    INDEX_NAME,
    SINGLE_NAME,
    TensorFiles,
    load_tensors,
    raw_bytes,
    save_tensors,
)
from compress.artifact.writer import ArtifactWriter
from compress.context import Context
from compress.errors import Interrupted, UnsupportedArch, UnsupportedFormat, UsageError
from compress.export import FORMATS, FormatByName
from compress.quant.numerics import nearest_weight
from compress.quant.scheme import SCHEMES
from compress.registry.model_source import resolve_model
from compress.stages import STAGES, Input, Inputs, PlanFacts, Port
from compress.stages import quantize_by_name as stage
from compress.stages.quantize_by_name import quantize_by_name
from compress.stages.quantize_by_name.spec import SCHEMES_BY_NAME, QuantizeByName

CONFIG: dict[str, Any] = {"model_type": "strange", "vocab_size": 300, "odd": {"kept": [1, 2.5, None]}}


def model(dtype: torch.dtype = torch.bfloat16) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)

    def noise(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    return {
        "embed.weight": noise(300, 128),
        "lm_head.weight": noise(300, 128),
        "layers.0.attn.weight": noise(200, 128),
        "layers.0.attn.bias": noise(200),
        "layers.0.down.weight": noise(128, 96),
        "layers.0.experts": noise(2, 64, 64),
        "layers.1.attn.weight": noise(200, 128),
        "layers.1.norm.weight": noise(128),
        "counts": torch.arange(3),
    }


def write(path: Path, tensors: dict[str, Tensor], *, num_files: int = 1, **config: Any) -> Path:
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps({**CONFIG, **config}))
    (path / "vocab.txt").write_text("a\nb\n")
    names = sorted(tensors)
    for idx in range(num_files):
        file = SINGLE_NAME if num_files == 1 else f"model-{idx + 1:05d}-of-{num_files:05d}.safetensors"
        save_tensors(path / file, {name: tensors[name] for name in names[idx::num_files]})
    if num_files > 1:
        places = {
            name: f"model-{idx + 1:05d}-of-{num_files:05d}.safetensors"
            for idx in range(num_files)
            for name in names[idx::num_files]
        }
        (path / INDEX_NAME).write_text(json.dumps({"metadata": {}, "weight_map": places}))
    return path


def quantized(path: Path, spec: QuantizeByName, directory: Path, **how: Any) -> tuple[Path, dict[str, Any]]:
    """Return the directory that the stage wrote, and its description."""
    directory.mkdir(exist_ok=True)
    (directory / "scratch").mkdir(exist_ok=True)
    out = directory / f"out-{len(list(directory.iterdir()))}"
    out.mkdir()
    source = resolve_model("path", str(path), None)
    writer = ArtifactWriter(out)
    context = Context("cpu", 0, directory / "scratch", **how)
    quantize_by_name(spec, Inputs(source, {Port.SOURCE: Input(path, source.digest)}), writer, context)
    assert writer.description is not None
    return out, writer.description


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("name", SCHEMES_BY_NAME)
@pytest.mark.one_in(4)
def test_codes_are_nearest_and_the_rest_passes_through(
    name: str, dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stage, "ROUNDED_AT_ONCE", 1)  # every block of rows by itself
    tensors = model(dtype)
    out, description = quantized(write(tmp_path / "m", tensors), QuantizeByName(scheme=name), tmp_path / "o")
    scheme = SCHEMES[name]
    codec = FORMATS.get("compressed-tensors").codec
    written = load_tensors(out)
    linears = ["layers.0.attn", "layers.1.attn"]
    if 96 % (scheme.group_size or 1) == 0:
        linears.append("layers.0.down")
    for linear in linears:
        wanted = nearest_weight(tensors.pop(f"{linear}.weight"), scheme, dtype)
        found = {leaf: written.pop(f"{linear}.{leaf}") for leaf in codec.leaves(scheme)}
        for leaf, tensor in codec.encode(wanted).items():
            assert found[leaf].dtype == tensor.dtype
            assert found[leaf].shape == tensor.shape
            assert bytes(raw_bytes(found[leaf])) == bytes(raw_bytes(tensor))
    assert written.keys() == tensors.keys()
    assert all(torch.equal(written[each], tensors[each]) for each in tensors)
    facts = description["facts"]["by_name"]
    assert facts["quantized"] == len(linears)
    assert facts["dense"]["no weight of a module"] == 1
    assert ("K = 96, no multiple of 128" in facts["dense"]) == (scheme.group_size == 128)
    assert facts["written_bytes"] == sum(each.numel() * each.itemsize for each in load_tensors(out).values())


def stacks(size: int) -> dict[str, Tensor]:
    """Two layers of three experts in stacks, the second input x output."""
    generator = torch.Generator().manual_seed(0)

    def noise(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(torch.bfloat16)

    return {
        "layers.0.experts.gate_up_proj": noise(3, 2 * size, 128),
        "layers.0.experts.down_proj": noise(3, 128, size),
        "layers.1.experts.gate_up_proj": noise(3, 128, 2 * size),
        "layers.1.experts.down_proj": noise(3, size, 128),
    }


def test_experts_in_stacks_get_codes_each_and_those_ignored_stay_stacks(tmp_path: Path) -> None:
    tensors = stacks(64)
    ignored = {name.replace(".0.", ".2."): each for name, each in tensors.items() if ".0." in name}
    tensors |= ignored
    spec = QuantizeByName(scheme="W4A16_G32", ignore=("layers.2.experts.*",))
    out, description = quantized(write(tmp_path / "m", tensors, num_files=2), spec, tmp_path / "o")
    written = load_tensors(out)
    codec = FORMATS.get("compressed-tensors").codec
    scheme = SCHEMES[spec.scheme]
    by_linear = {
        "gate_proj": (
            tensors["layers.0.experts.gate_up_proj"][:, :64],
            tensors["layers.1.experts.gate_up_proj"][..., :64],
        ),
        "up_proj": (
            tensors["layers.0.experts.gate_up_proj"][:, 64:],
            tensors["layers.1.experts.gate_up_proj"][..., 64:],
        ),
        "down_proj": (tensors["layers.0.experts.down_proj"], tensors["layers.1.experts.down_proj"]),
    }
    for linear, (first, second) in by_linear.items():
        for layer, of_experts in enumerate((first, second.mT)):
            for expert, matrix in enumerate(of_experts):
                module = f"layers.{layer}.experts.{expert}.{linear}"
                wanted = codec.encode(nearest_weight(matrix.contiguous(), scheme, torch.bfloat16))
                assert all(
                    torch.equal(written.pop(f"{module}.{leaf}"), each) for leaf, each in wanted.items()
                )
    assert written.keys() == ignored.keys()
    assert all(torch.equal(written[name], each) for name, each in ignored.items())
    facts = description["facts"]["by_name"]
    assert (facts["quantized"], facts["dense"]) == (18, {"ignored by the recipe": 9})
    assert any("transformers gathers" in each for each in description["facts"]["warnings"])
    places = json.loads((out / INDEX_NAME).read_text())["weight_map"]
    assert (
        places["layers.0.experts.0.gate_proj.weight_packed"]
        != places["layers.0.experts.0.down_proj.weight_packed"]
    )


@pytest.mark.parametrize("part", ["layers.1.experts.2.*", "*.down_proj", "*.gate_proj"])
def test_experts_in_stacks_are_not_parted(part: str, tmp_path: Path) -> None:
    path = write(tmp_path / "m", stacks(64))
    with pytest.raises(
        UsageError, match=r"part the experts layers\.[01]\.experts, .*'layers\.\*\.experts\.\*'"
    ):
        quantized(path, QuantizeByName(scheme="W4A16_G32", ignore=(part,)), tmp_path / "o")


def test_experts_of_which_a_product_does_not_fit_stay_in_their_stack(tmp_path: Path) -> None:
    tensors = {"layers.0.attn.weight": model()["layers.0.attn.weight"], **stacks(96)}
    out, description = quantized(
        write(tmp_path / "m", tensors), QuantizeByName(scheme="W4A16_G128"), tmp_path / "o"
    )
    written = load_tensors(out)
    assert all(torch.equal(written[name], tensors[name]) for name in stacks(96))
    assert description["facts"]["by_name"]["dense"] == {"K = 96, no multiple of 128": 18}


def test_the_config_and_other_files_pass_through(tmp_path: Path) -> None:
    out, description = quantized(write(tmp_path / "m", model()), QuantizeByName(), tmp_path / "o")
    config = json.loads((out / "config.json").read_text())
    stated = config.pop("quantization_config")
    assert config == CONFIG
    assert (out / "vocab.txt").read_text() == "a\nb\n"
    targets = [r"re:.*\blayers\.\d+\.attn$", r"re:.*\blayers\.\d+\.down$"]
    assert stated["config_groups"]["group_0"]["targets"] == targets
    assert stated["ignore"] == ["embed", "lm_head"]
    assert "not validated on the bundled runtime" in description["facts"]["warnings"][0]


@pytest.mark.parametrize("num_files", [1, 3])
def test_bytes_are_the_same_again_and_shards_stay(num_files: int, tmp_path: Path) -> None:
    source = write(tmp_path / "m", model(), num_files=num_files)
    first, _ = quantized(source, QuantizeByName(scheme="W4A16_G64"), tmp_path / "a")
    again, _ = quantized(source, QuantizeByName(scheme="W4A16_G64"), tmp_path / "b")
    names = sorted(each.name for each in first.iterdir())
    assert len([each for each in names if each.endswith(".safetensors")]) == num_files
    assert (INDEX_NAME in names) == (num_files > 1)
    assert all((first / name).read_bytes() == (again / name).read_bytes() for name in names)
    assert "layers.0.attn.weight_packed" in TensorFiles(first)


def test_a_run_that_was_stopped_goes_on_after_the_last_shard(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write(tmp_path / "m", model(), num_files=3)
    whole, _ = quantized(source, QuantizeByName(), tmp_path / "whole")
    asked = iter([None, None, 15])
    with pytest.raises(Interrupted):
        quantized(source, QuantizeByName(), tmp_path / "o", stop_signal=lambda: next(asked))
    rounded: list[str] = []
    plain = stage._write_shard
    monkeypatch.setattr(
        stage,
        "_write_shard",
        lambda s, names, path, *rest: (rounded.append(path.name), plain(s, names, path, *rest)),
    )
    out, _ = quantized(source, QuantizeByName(), tmp_path / "o")
    assert rounded == ["model-00003-of-00003.safetensors"]
    for file in whole.iterdir():
        assert (out / file.name).read_bytes() == file.read_bytes()


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("name", ["layers.1.norm.weight", "layers.0.attn.bias", "embed.weight"])
def test_a_tensor_that_is_copied_is_finite(name: str, bad: float, tmp_path: Path) -> None:
    tensors = model()
    tensors[name].view(-1)[-1] = bad
    with pytest.raises(UnsupportedFormat, match=rf"'{name}' of the model holds NaN or infinity"):
        quantized(write(tmp_path / "m", tensors), QuantizeByName(), tmp_path / "o")


def test_a_mask_may_be_infinite_and_no_tensor_holds_nan(tmp_path: Path) -> None:
    mask = torch.full((4, 4), -float("inf")).triu(1)
    tensors = {**model(), "layers.0.mask": mask, "layers.0.none": torch.empty(0)}
    out, _ = quantized(write(tmp_path / "m", tensors), QuantizeByName(), tmp_path / "o")
    assert torch.equal(load_tensors(out)["layers.0.mask"], mask)
    mask[0, 0] = float("nan")
    with pytest.raises(UnsupportedFormat, match=r"'layers\.0\.mask' of the model holds NaN"):
        quantized(write(tmp_path / "damaged", tensors), QuantizeByName(), tmp_path / "p")


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_weight_that_is_not_finite_is_refused_by_name(bad: float, tmp_path: Path) -> None:
    tensors = model()
    tensors["layers.1.attn.weight"][7, 5] = bad
    with pytest.raises(UnsupportedFormat, match=r"layers\.1\.attn\.weight.* NaN or infinity"):
        quantized(write(tmp_path / "m", tensors), QuantizeByName(), tmp_path / "o")


def test_quantized_checkpoints_and_empty_choices_are_refused(tmp_path: Path) -> None:
    facts = {"config": {"quantization_config": {"quant_method": "gptq"}}}
    with pytest.raises(
        UnsupportedFormat, match=r"quantized already: its config\.json has a quantization_config"
    ):
        quantized(write(tmp_path / "m", model(), **facts["config"]), QuantizeByName(), tmp_path / "o")
    with pytest.raises(UsageError, match="no matrix is left to quantize"):
        quantized(write(tmp_path / "m", model()), QuantizeByName(ignore=("layers.*",)), tmp_path / "o")


def test_specs_that_no_format_or_no_weight_alone_decides_are_refused() -> None:
    with pytest.raises(ValueError, match="no text goes through a model"):
        QuantizeByName(scheme="FP8_STATIC")
    with pytest.raises(ValueError, match="multiplied as one"):
        QuantizeByName(scheme="NVFP4")
    with pytest.raises(ValueError, match="fp8 is written in FP8_BLOCK alone"):
        QuantizeByName(scheme="FP8_DYNAMIC", format="fp8")
    with pytest.raises(ValueError, match="gptq is not written by tensor name"):
        QuantizeByName(format="gptq")
    assert QuantizeByName(scheme="FP8_BLOCK", format="fp8").weights == SCHEMES["FP8_BLOCK"]


def test_every_format_by_name_has_a_config_that_its_own_codec_reads() -> None:
    for name, form in FORMATS.items():
        if not isinstance(form, FormatByName):
            continue
        for scheme in map(SCHEMES.get, SCHEMES_BY_NAME):
            assert scheme is not None
            if form.refusal_by_name(scheme) is None:
                config = form.config_by_name(
                    scheme,
                    quantized=[r"re:model\.layers\.\d+\.fc$", "model.layers.7.up"],
                    dense=["model.layers.7.gate"],
                )
                names = ["model.layers.0.fc", "model.layers.7.up", "model.layers.7.gate"]
                read = form.codec.schemes(config, names)
                assert read == dict.fromkeys(names[:2], scheme)
                if name == "compressed-tensors" and scheme.num_bits < 8:
                    assert config["dequantize"], "some classes initialise the parameter `weight`"


def test_the_plan_states_the_choice_and_the_bytes(tmp_path: Path) -> None:
    source = write(tmp_path / "m", model())
    spec = QuantizeByName(scheme="W4A16_G128")
    facts = PlanFacts(UnsupportedArch("unknown"), "cpu", {}, source=source)
    found = STAGES.get("quantize_by_name").estimate(spec, facts)
    out, _ = quantized(source, spec, tmp_path / "o")
    written = (out / SINGLE_NAME).stat().st_size
    assert found.disk_bytes <= written < found.disk_bytes + 2000
    text = "\n".join(found.notes)
    assert "2 linears" in text
    assert "quantized: layers.*.attn (2)" in text
    assert "dense, K = 96, no multiple of 128: layers.*.down" in text
    assert "dense, no weight of a module: layers.*.experts" in text
    assert "not validated on the bundled runtime" in text
    with pytest.raises(UnsupportedArch, match="unknown"):
        STAGES.get("quantize").estimate(STAGES.get("quantize").spec(), facts)
    unseen = STAGES.get("quantize_by_name").estimate(spec, PlanFacts(UnsupportedArch("unknown"), "cpu", {}))
    assert "decided once the checkpoint is on this machine" in unseen.notes[0]
