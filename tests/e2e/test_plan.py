"""`compress plan` for every recipe that ships, without a network."""

import json
import os
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from compress.models.family import family_of
from compress.models.known import known_config, known_models

ROOT = Path(__file__).parents[2]
RECIPES = sorted((ROOT / "recipes").glob("*.yaml"))
WITHOUT_A_MODEL = "w4a16"  # names ./model, which its user puts there


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        raise AssertionError("the network was used")

    monkeypatch.setattr(socket.socket, "connect", refuse)


@pytest.mark.usefixtures("no_network")
@pytest.mark.parametrize(
    "path", [each for each in RECIPES if each.stem != WITHOUT_A_MODEL], ids=lambda path: path.stem
)
def test_every_recipe_passes_plan_offline(
    path: Path, command: Callable[..., tuple[int, str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    code, out, err = command("plan", path, "--offline", "--device", "cuda", "--json")
    assert code == 0, err
    document = json.loads(out)
    for plan in document.get("plans", [document]):
        assert plan["peak_bytes"] > 0
        exports = [row for row in plan["stages"] if row["kind"] == "export"]
        programs = {note.partition(":")[0] for row in exports for note in row["notes"]}
        assert programs >= {"vLLM", "transformers"}


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_the_first_line_of_a_recipe_tells_what_it_is_for(path: Path) -> None:
    first = path.read_text(encoding="utf-8").partition("\n")[0]
    assert re.fullmatch(r"# [A-Z].{20,106}\.", first), first


def test_the_wheel_has_the_recipes_and_init_finds_them_there(tmp_path: Path) -> None:
    """Outside the checkout, with the files that the build step writes."""
    built = tmp_path / "lib"
    build = [sys.executable, "setup.py", "-q", "build_py", "--build-lib", str(built)]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True)
    assert {path.name for path in (built / "compress" / "recipes").iterdir()} == {
        path.name for path in RECIPES
    }
    init = [sys.executable, "-m", "compress", "init", str(tmp_path / "recipe.yaml")]
    environment = {**os.environ, "PYTHONPATH": str(built)}
    subprocess.run(init, cwd=tmp_path, env=environment, check=True, capture_output=True)
    assert (tmp_path / "recipe.yaml").read_bytes() == (ROOT / "recipes" / "quickstart.yaml").read_bytes()


@pytest.mark.parametrize(
    ("name", "num_params"),
    [
        ("llama-3.1-8b", 8_030_261_248),
        ("llama-3.1-70b", 70_553_706_496),
        ("llama-3.2-1b", 1_235_814_400),
        ("llama-2-13b", 13_015_864_320),
        ("qwen3-8b", 8_190_735_360),
        ("qwen2.5-7b", 7_615_616_512),
        ("mistral-7b-v0.3", 7_248_023_552),
        ("gemma-3-12b", 11_766_034_176),
        ("phi-4", 14_659_507_200),
        ("gpt-oss-20b", 20_914_757_184),
        ("qwen3-30b-a3b", 30_532_122_624),
        ("qwen3-32b", 32_762_123_264),
        ("gemma-4-26b-a4b", 25_233_141_790),
        ("gemma-4-e2b", 4_628_569_379),
        ("gemma-4-e4b", 7_463_013_418),
        ("ernie-4.5-21b-a3b-pt", 21_825_437_888),
        ("glm-4.5-air", 106_852_251_264),
        ("glm-4.7-flash", 29_943_393_920),
        ("deepseek-v2-lite", 15_706_484_224),
        ("deepseek-r1", 671_026_419_200),
        ("trinity-mini", 26_123_974_400),
        ("mistral-small-4-119b-2603", 118_435_955_712),
        ("qwen3.5-9b", 8_953_803_264),
        ("granite-4.0-h-micro", 3_191_396_096),
        ("granite-4.0-h-tiny", 6_939_037_248),
        ("granite-4.0-h-small", 32_207_337_984),
        ("qwen3.5-35b-a3b", 34_660_610_688),
        ("nemotron-nano-9b-v2", 8_888_227_328),
        ("apertus-8b-2509", 8_053_338_240),
        ("falcon-h1-34b", 33_642_221_312),
        ("kimi-linear-48b-a3b", 49_122_681_728),
        ("nemotron-3-nano-30b-a3b", 31_577_940_288),
        ("nemotron-3-super-120b-a12b", 120_668_707_840),
    ],
)
def test_shipped_shapes_have_the_published_number_of_parameters(name: str, num_params: int) -> None:
    config = known_config(f"vendor/{name}-Instruct")
    assert config is not None
    assert family_of(config).read_config(config).num_params == num_params


def test_every_shipped_shape_has_its_count_checked() -> None:
    assert len(known_models()) == 36


@pytest.mark.usefixtures("no_network")
def test_a_mixture_is_planned_with_its_active_parameters_and_the_tokens_of_an_expert(
    command: Callable[..., tuple[int, str, str]], tmp_path: Path
) -> None:
    recipe = tmp_path / "recipe.yaml"
    text = """version: 1
model: hf://Qwen/Qwen3-30B-A3B
stages:
  - kind: calibrate
    num_samples: 8
  - kind: quantize
    scheme: W4A16_G128
    round: {kind: gptq}
"""
    recipe.write_text(text)
    code, out, err = command("plan", recipe, "--offline", "--device", "cuda")
    assert code == 0, err
    assert "30,532 M parameters (3,353 M active), 48 layers of 128 experts, 8 a token" in out
    assert "about 256 tokens each if all 128 are chosen alike" in out
    assert "most are starved" in out
    assert "calibrate, quantize: keys need the digest of the model's files, which are not all on" in out
    assert "chat template and layers that predict tokens are checked once a run has fetched them" in out
    recipe.write_text(text.replace("Qwen/Qwen3-30B-A3B", "Qwen/Qwen3-8B"))
    _, out, _ = command("plan", recipe, "--offline", "--device", "cuda")
    assert "expert" not in out
    assert "active" not in out


@pytest.mark.usefixtures("no_network")
@pytest.mark.parametrize("model", ["Qwen3.5-9B", "Qwen3.5-35B-A3B"])
@pytest.mark.parametrize("form", ["fp8", "compressed-tensors"])
def test_blocks_of_fp8_are_planned_for_heads_that_rotate_in_part(
    model: str, form: str, command: Callable[..., tuple[int, str, str]], tmp_path: Path
) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(f"""version: 1
model: hf://vendor/{model}-Instruct
stages:
  - {{kind: quantize, scheme: FP8_BLOCK, round: {{kind: rtn}}}}
  - {{kind: export, formats: [{form}]}}
""")
    code, out, err = command("plan", recipe, "--offline", "--device", "cuda")
    assert code == 0, err
    assert "export: vLLM: loads" in out


@pytest.mark.usefixtures("no_network")
@pytest.mark.parametrize(
    ("kv_cache", "validated"),
    [("int8", None), ("int4", None), ("fp8", None), ("int8", "INT4_TOKEN_HEAD_HADAMARD")],
)
def test_a_cache_of_latents_is_planned_or_its_format_refused(
    kv_cache: str, validated: str | None, command: Callable[..., tuple[int, str, str]], tmp_path: Path
) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(f"""version: 1
model: hf://deepseek-ai/DeepSeek-V2-Lite
stages:
  - {{kind: quantize, scheme: FP8_DYNAMIC, kv_cache: {kv_cache}}}
  - {{kind: validate{"" if validated is None else f", kv_format: {validated}"}}}
""")
    code, out, err = command("plan", recipe, "--offline", "--device", "cuda")
    if kv_cache == "int8" and validated is None:
        assert code == 0, err
        assert "KV cache INT8_TOKEN_HEAD, 15,660 bytes a token" in out
        assert "caches 15,552 numbers a token for 138,240 of all heads" in out
    else:
        assert code == 2
        assert "latent attention, whose cache holds latents: take FP8_TOKEN_HEAD" in err


def test_plan_refuses_what_is_no_device(command: Callable[..., tuple[int, str, str]]) -> None:
    code, _, err = command("plan", ROOT / "recipes" / "quickstart.yaml", "--device", "tpu")
    assert code == 2
    assert "'tpu' is not a device" in err


@pytest.mark.usefixtures("no_network")
def test_a_70b_model_is_planned_from_its_shape_alone_for_any_number_of_gpus(
    command: Callable[..., tuple[int, str, str]], tmp_path: Path
) -> None:
    path = tmp_path / "large.yaml"
    stages = [
        {"kind": "calibrate", "num_samples": 128, "seq_len": 2048},
        {"kind": "quantize", "preset": "balanced"},
        {"kind": "export"},
    ]
    path.write_text(json.dumps({"version": 1, "model": "hf://meta-llama/Llama-3.1-70B", "stages": stages}))
    documents = {}
    for ranks in (1, 4):
        code, out, err = command("plan", path, "--offline", "--device", "cuda", "--ranks", ranks, "--json")
        assert code == 0, err
        documents[ranks] = json.loads(out)
        assert documents[ranks]["ranks"] == ranks
    alone, shared = (
        {row["kind"]: row for row in document["stages"]}["quantize"] for document in documents.values()
    )
    assert shared["seconds"] < alone["seconds"] < 4 * shared["seconds"]
    assert shared["peak_bytes"] < alone["peak_bytes"] < 80e9 < 2 * documents[1]["model"]["params"]
    assert any("pinned host memory" in note for note in alone["notes"])
    assert "planned for 4 GPUs" in command("plan", path, "--offline", "--device", "cuda", "--ranks", 4)[1]
    assert "planned for 1 GPU" in command("plan", path, "--offline", "--device", "cuda")[1]


BY_NEAREST = [{"kind": "quantize", "scheme": "FP8_DYNAMIC", "round": {"kind": "rtn"}}]


def test_a_run_counts_float32_tensors_that_it_rounds_once(
    model_dir: Path, recipe: Callable[..., Path], work: Path, command: Callable[..., tuple[int, str, str]]
) -> None:
    shutil.copytree(model_dir, work / "model")
    file = work / "model" / "model.safetensors"
    tensors = load_file(file)
    wide = [name for name in sorted(tensors) if name.endswith("input_layernorm.weight")]
    save_file({name: each.float() if name in wide else each for name, each in tensors.items()}, file)
    code, _, err = command("run", recipe(model="./model", stages=BY_NEAREST))
    assert code == 0, err
    note = f"3 tensors are float32 in this bfloat16 checkpoint and rounded to bfloat16: {', '.join(wide)}."
    assert err.count(note) == 1
    (log,) = (work / "runs").rglob("*.log")
    assert log.read_text().count(note) == 1
    layers = list((work / ".compress").glob("store/*/layer-00000.safetensors"))
    assert [load_file(each)["attn_norm.weight"].dtype for each in layers] == [torch.bfloat16]
    shutil.copyfile(model_dir / "model.safetensors", file)
    assert "float32" not in command("run", recipe(model="./model", stages=BY_NEAREST))[2]


def stated_as(dtype: str, model_dir: Path, model: Path) -> tuple[Path, dict[str, Tensor]]:
    """Copy a model and change the dtype of its config; return the file of its weights, and these in it."""
    shutil.copytree(model_dir, model)
    config = model / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "dtype": dtype}))
    file = model / "model.safetensors"
    return file, {name: each.to(getattr(torch, dtype)) for name, each in load_file(file).items()}


@pytest.mark.parametrize("stated", ["float16", "bfloat16"])
def test_a_run_counts_tensors_in_the_other_format_of_16_bits(
    stated: str,
    model_dir: Path,
    recipe: Callable[..., Path],
    work: Path,
    command: Callable[..., tuple[int, str, str]],
) -> None:
    file, tensors = stated_as(stated, model_dir, work / "model")
    other = torch.bfloat16 if stated == "float16" else torch.float16
    norms = [name for name in tensors if name.endswith("norm.weight")]
    save_file({name: each.to(other) if name in norms else each for name, each in tensors.items()}, file)
    code, _, err = command("run", recipe(model="./model", stages=BY_NEAREST))
    assert code == 0, err
    name = str(other).removeprefix("torch.")
    assert (
        err.count(f"{len(norms)} tensors are {name} in this {stated} checkpoint and rounded to {stated}: ")
        == 1
    )
    written = [load_file(each) for each in (work / ".compress").glob("store/*/*.safetensors")]
    dense = {each.dtype for tensors in written for name, each in tensors.items() if "norm" in name}
    assert dense == {getattr(torch, stated)}


@pytest.mark.parametrize("stated", ["bfloat16", "float32"])
def test_a_run_counts_tensors_of_64_bits(
    stated: str,
    model_dir: Path,
    recipe: Callable[..., Path],
    work: Path,
    command: Callable[..., tuple[int, str, str]],
) -> None:
    file, tensors = stated_as(stated, model_dir, work / "model")
    save_file({**tensors, "model.norm.weight": tensors["model.norm.weight"].double()}, file)
    code, _, err = command("run", recipe(model="./model", stages=BY_NEAREST))
    assert code == 0, err
    note = f"1 tensor is float64 in this {stated} checkpoint and rounded to {stated}: model.norm.weight."
    assert err.count(note) == 1


def test_a_number_beyond_float16_is_refused_where_the_config_states_it(
    model_dir: Path, recipe: Callable[..., Path], work: Path, command: Callable[..., tuple[int, str, str]]
) -> None:
    shutil.copytree(model_dir, work / "model")
    config = work / "model" / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "dtype": "float16"}))
    file = work / "model" / "model.safetensors"
    plain = load_file(file)
    stages = [{"kind": "quantize", "scheme": "FP8_DYNAMIC", "round": {"kind": "rtn"}}]
    places = {"model.norm": "outer.norm", "model.layers.1.input_layernorm": "layers.1.attn_norm"}
    for name, place in places.items():
        tensors = {key: each.clone() for key, each in plain.items()}
        tensors[f"{name}.weight"][0] = 1e5
        save_file(tensors, file)
        code, _, err = command("run", recipe(model="./model", stages=stages))
        assert code == 2, err
        assert f"the weight '{place}.weight' of the model has numbers beyond the range of float16" in err


def test_float32_tensors_that_are_written_as_they_are_stored_are_not_counted_as_rounded(
    model_dir: Path, recipe: Callable[..., Path], work: Path, command: Callable[..., tuple[int, str, str]]
) -> None:
    shutil.copytree(model_dir, work / "model")
    file = work / "model" / "model.safetensors"
    tensors = load_file(file)
    norms = [name for name in tensors if name.endswith("layernorm.weight")]
    save_file({name: each.float() if name in norms else each for name, each in tensors.items()}, file)
    code, _, err = command("run", recipe(model="./model", stages=[{"kind": "quantize_by_name"}]))
    assert code == 0, err
    assert "rounded to bfloat16" not in err
    (written,) = (work / ".compress").glob("store/*/model.safetensors")
    found = load_file(written)
    assert norms
    assert {found[name].dtype for name in norms} == {torch.float32}


def test_plan_and_run_name_fields_that_change_nothing_once(
    model_dir: Path, recipe: Callable[..., Path], work: Path, command: Callable[..., tuple[int, str, str]]
) -> None:
    shutil.copytree(model_dir, work / "model")
    file = work / "model" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"unsloth_fixed": True, "use_mrope": False}))
    path = recipe(model="./model")
    note = "that change nothing in a"
    for fields in (command("plan", path)[1], command("run", path, "--until", "calibrate")[2]):
        assert fields.count(note) == 1
        assert "unsloth_fixed, use_mrope." in fields
    (log,) = (work / "runs").rglob("*.log")
    assert log.read_text().count(note) == 1
    assert json.loads(command("plan", path, "--json")[1])["model"]["notes"][0].count("use_mrope") == 1


@pytest.mark.usefixtures("no_network")
def test_stages_of_a_hub_model_are_looked_up_where_its_files_are_on_this_machine(
    model_dir: Path,
    recipe: Callable[..., Path],
    work: Path,
    command: Callable[..., tuple[int, str, str]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A cache as the hub's client writes it."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(work / "hub"))
    kept = work / "hub" / "models--org--name"
    commit = "0123456789abcdef0123456789abcdef01234567"
    shutil.copytree(model_dir, kept / "snapshots" / commit)
    (kept / "refs").mkdir()
    (kept / "refs" / "main").write_text(commit)
    stages = [{"kind": "quantize", "scheme": "FP8_DYNAMIC", "round": {"kind": "rtn"}}]
    path = recipe(model="hf://org/name", stages=stages)

    def states() -> tuple[list[bool | None], list[str]]:
        code, out, err = command("plan", path, "--offline", "--json")
        assert code == 0, err
        document = json.loads(out)
        return [row["cached"] for row in document["stages"]], document["model"]["notes"]

    assert states() == ([False], [])
    code, _, err = command("run", path, "--offline")
    assert code == 0, err
    assert states() == ([True], [])
    (kept / "snapshots" / commit / "model.safetensors").unlink()
    cached, notes = states()
    assert cached == [None]
    assert len(notes) == 1
    assert notes[0].startswith("Files of the model are not on this machine")


def _cut_off(model: Path) -> None:
    file = model / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def _of_another_width(model: Path) -> None:
    file = model / "model.safetensors"
    tensors = load_file(file)
    name = "model.layers.1.mlp.up_proj.weight"
    save_file({**tensors, name: tensors[name][:, :-1].contiguous()}, file)


def _without_a_tokenizer(model: Path) -> None:
    (model / "tokenizer.json").unlink()


def _with_half_a_tokenizer(model: Path) -> None:
    file = model / "tokenizer.json"
    file.write_bytes(file.read_bytes()[:1000])


def _pickled(model: Path) -> None:
    (model / "model.safetensors").rename(model / "pytorch_model.bin")


def _of_64_bits(model: Path) -> None:
    config = model / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "dtype": "float64"}))


def refused_by_plan_and_run(
    path: Path, code: int, message: str, command: Callable[..., tuple[int, str, str]]
) -> None:
    """Check that both refuse a recipe, the run before its first stage."""
    for args in (("plan", path, "--offline"), ("run", path)):
        found, _, err = command(*args)
        assert (found, message in err) == (code, True), err
        assert "built in" not in err


@pytest.mark.parametrize(
    ("spoil", "code", "message"),
    [
        (_cut_off, 5, "model.safetensors is truncated"),
        (_of_another_width, 2, "tensor 'model.layers.1.mlp.up_proj.weight' is ["),
        (_without_a_tokenizer, 2, "has no tokenizer.json"),
        (_with_half_a_tokenizer, 2, "tokenizer.json' is not a tokenizer that `tokenizers` can read"),
        (_pickled, 2, "pytorch_model.bin is a pickle"),
        (_of_64_bits, 2, "config.json states the dtype float64"),
    ],
)
def test_a_directory_that_a_run_refuses_is_refused_by_plan_and_before_the_first_stage(
    spoil: Callable[[Path], None],
    code: int,
    message: str,
    model_dir: Path,
    recipe: Callable[..., Path],
    work: Path,
    command: Callable[..., tuple[int, str, str]],
) -> None:
    shutil.copytree(model_dir, work / "model")
    spoil(work / "model")
    stages = [
        {"kind": "quantize", "scheme": "FP8_DYNAMIC", "round": {"kind": "rtn"}},
        {"kind": "export"},
        {"kind": "validate", "num_samples": 2, "seq_len": 32, "latency": None},
    ]
    path = recipe(model="./model", stages=stages)
    refused_by_plan_and_run(path, code, message, command)


def test_parameters_of_a_small_model_are_not_rounded_to_none(
    recipe: Callable[..., Path], command: Callable[..., tuple[int, str, str]]
) -> None:
    code, out, err = command("plan", recipe(), "--offline")
    assert code == 0, err
    assert ": 0.49 M parameters, 3 layers, bfloat16; " in out  # 492,416


def test_a_directory_that_holds_a_config_alone_is_planned(
    model_dir: Path, recipe: Callable[..., Path], work: Path, command: Callable[..., tuple[int, str, str]]
) -> None:
    (work / "model").mkdir()
    shutil.copy(model_dir / "config.json", work / "model")
    stages = [{"kind": "calibrate", "seq_len": 64}, {"kind": "quantize", "scheme": "FP8_DYNAMIC"}]
    code, out, err = command("plan", recipe(model="./model", stages=stages), "--offline")
    assert code == 0, err
    assert "FP8_DYNAMIC" in out


@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize("kind", ["calibrate", "distill", "validate"])
def test_a_card_of_conversations_needs_the_chat_template_of_the_model(
    kind: str,
    mixed: bool,
    model_dir: Path,
    recipe: Callable[..., Path],
    work: Path,
    command: Callable[..., tuple[int, str, str]],
) -> None:
    shutil.copytree(model_dir, work / "model")
    facts = "title: t\nlicense: cc0-1.0\nsource: s\n"
    row = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
    (work / "chat.jsonl").write_text(json.dumps(row) + "\n")
    (work / "plain.yaml").write_text(
        f"kind: local\n{facts}paths: [chat.jsonl]\nformat: jsonl\ntext_field: messages\n"
    )
    (work / "chat.yaml").write_text(
        f"kind: local\n{facts}paths: [chat.jsonl]\nformat: jsonl\ntext_field: messages\nchat: {{}}\n"
    )
    cards = "cards: [{card: plain.yaml}, {card: chat.yaml}]\n"
    (work / "mix.yaml").write_text(f"kind: mix\n{facts}{cards}")
    data = {"data": "mix.yaml" if mixed else "chat.yaml"}
    stages = [
        {"kind": "calibrate", "num_samples": 2, "seq_len": 32},
        {"kind": "prune", "depth": {"keep": 1}},
        {"kind": "distill", "tokens": 256, "seq_len": 32, "batch_size": 2, "eval_samples": 2},
        {"kind": "export"},
        {"kind": "validate", "num_samples": 2, "seq_len": 32, "latency": None},
    ]
    stages = [{**each, **(data if each["kind"] == kind else {})} for each in stages]
    path = recipe(model="./model", stages=stages)
    refused_by_plan_and_run(path, 2, "takes conversations by the chat template", command)


def test_an_adapter_beside_a_model_is_noted_by_plan_and_run(
    recipe: Callable[..., Path], command: Callable[..., tuple[int, str, str]], model_dir: Path, work: Path
) -> None:
    shutil.copytree(model_dir, work / "model")
    path = recipe(model="model")
    told = "its adapter is left out"
    assert told not in command("plan", path, "--offline")[1]
    (work / "model" / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    code, out, _ = command("plan", path, "--offline", "--json")
    assert code == 0
    assert any(told in note for note in json.loads(out)["model"]["notes"])
    assert command("run", path, "--until", "calibrate", "--run-dir", "run", "--device", "cpu")[0] == 0
    assert told in (work / "run" / "run.log").read_text()
