"""Pruning through the commands: planned, cut, resumed, quantized behind it, exported, shown in the report."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from compress.artifact.manifest import Artifact, open_artifact
from compress.export import open_checkpoint, open_weights
from compress.methods.prune import COMPENSATIONS, SCORERS
from compress.models.weights import build_decoder, dense
from tests.e2e.test_ranks import digest, launch
from tests.support.slow import slow
from tests.support.tiny_run import NUM_LAYERS, RECIPE

Command = Callable[..., tuple[int, str, str]]
CALIBRATE, _, _, VALIDATE = RECIPE["stages"]
BY_HAND: dict[str, Any] = {"heads": {"keep": 0.5}, "ffn": {"keep": 0.7}, "multiple": 32}
QUANTIZE = {"kind": "quantize", "scheme": "W4A16_G32", "round": {"kind": "rtn"}}


def stages(num_samples: int = 8, **prune: Any) -> list[dict[str, Any]]:
    return [{**CALIBRATE, "num_samples": num_samples}, {"kind": "prune", **prune}]


def run(command: Command, path: Path, work: Path, name: str = "run") -> Artifact:
    code, _, err = command("run", path, "--workspace", work / f"{name}-ws", "--run-dir", work / name)
    assert code == 0, err
    return open_artifact(work / name / "artifacts" / "prune")


def refused(command: Command, path: Path, *, by: str = "plan") -> str:
    code, _, err = command(by, path)
    assert code == 2, err
    return err


def test_prune_then_quantize_then_export_compares_with_the_original_model(
    recipe: Callable[..., Path], command: Command, work: Path, model_dir: Path
) -> None:
    path = recipe(stages=[*stages(**BY_HAND), QUANTIZE, {"kind": "export"}, {**VALIDATE, "gates": {}}])
    code, out, err = command("plan", path, "--json")
    assert code == 0, err
    planned = {stage["kind"]: stage for stage in json.loads(out)["stages"]}
    assert any("heads 4 -> 2, KV heads 2 -> 1, FFN 256 -> 192" in note for note in planned["prune"]["notes"])
    assert (
        "ffn: keep 0.7 of 256 is 179.2; 192 is the nearest number that consumers take"
        in planned["prune"]["notes"]
    )
    pruned = run(command, path, work)
    facts = pruned.manifest.facts["pruning"]
    assert [facts["after"][name] for name in ("heads", "kv_heads", "ffn", "layers")] == [
        2,
        1,
        192,
        NUM_LAYERS,
    ]
    assert [facts["before"][name] for name in ("heads", "kv_heads", "ffn", "layers")] == [
        4,
        2,
        256,
        NUM_LAYERS,
    ]
    exported = open_artifact(work / "run" / "artifacts" / "export")
    opened = open_checkpoint(exported.path)
    assert opened.arch.num_params == facts["after"]["params"] == open_weights(pruned.path).arch.num_params
    sizes = {
        kind: sum(f.size_bytes for f in each.manifest.files if "safetensors" in f.path)
        for kind, each in (("q", exported), ("d", pruned))
    }
    for kind, stage in (("q", "export"), ("d", "prune")):
        assert sizes[kind] == pytest.approx(planned[stage]["disk_bytes"], rel=0.05)
    report = json.loads((work / "run" / "evidence" / "report.json").read_text())
    original = build_decoder(open_weights(model_dir), dtype=torch.float32, device=torch.device("cpu"))
    source_bytes = sum(row["source_bytes"] for row in report["artifact"]["sizes"])
    assert source_bytes == 2 * original.arch.num_params
    assert report["accuracy"]["kl_mean"]["value"] > 0
    assert report["pruning"] == facts
    page = (work / "run" / "evidence" / "report.html").read_text()
    for plot in ("pruned_heads", "pruned_channels"):
        assert f'class="plot {plot}"' in page
    assert "What was removed" in page
    card = (work / "run" / "evidence" / "README.md").read_text()
    assert "base_model_relation: finetune" in card
    assert "Pruned to 2 of 4 query heads, 1 of 2 KV heads, 192 of 256 FFN channels: " in card
    assert "pruned_depth" not in page
    code, out, _ = command("inspect", pruned.path)
    assert code == 0
    assert "shares" not in out
    code, out, err = command("resume", work / "run", "--json")
    assert code == 0, err
    assert all(stage["cached"] for stage in json.loads(out)["stages"])


def test_what_is_pruned_alone_is_published_dense_or_validated_as_it_is(
    recipe: Callable[..., Path], command: Command, work: Path, model_dir: Path
) -> None:
    path = recipe(stages=[*stages(**BY_HAND), {"kind": "export"}, {**VALIDATE, "gates": {}}])
    pruned = run(command, path, work)
    exported = work / "run" / "artifacts" / "export"
    assert (exported / "tokenizer.json").read_bytes() == (model_dir / "tokenizer.json").read_bytes()
    config = json.loads((exported / "config.json").read_text())
    assert [
        config[name]
        for name in ("num_attention_heads", "num_key_value_heads", "head_dim", "intermediate_size")
    ] == [2, 1, 32, 192]
    assert "quantization_config" not in config
    tokens = torch.arange(20).view(1, -1)
    one, other = (
        build_decoder(open_weights(each), dtype=torch.float32, device=torch.device("cpu"))
        for each in (pruned.path, exported)
    )
    assert torch.equal(one(tokens), other(tokens))
    report = json.loads((work / "run" / "evidence" / "report.json").read_text())
    assert "dense weights" in report["title"]
    path = recipe(stages=[*stages(**BY_HAND), {**VALIDATE, "gates": {}}])
    assert command("run", path, "--workspace", work / "run-ws", "--run-dir", work / "direct")[0] == 0
    direct = json.loads((work / "direct" / "evidence" / "report.json").read_text())
    assert direct["accuracy"] == report["accuracy"]
    assert direct["pruning"] == report["pruning"]
    err = refused(command, recipe(stages=[CALIBRATE, QUANTIZE, {"kind": "prune", **BY_HAND}]))
    assert "'prune' comes after quantize" in err
    assert "'export' needs quantized or dense" in refused(
        command, recipe(stages=[CALIBRATE, {"kind": "export"}])
    )
    err = refused(command, recipe(stages=[*stages(**BY_HAND), {"kind": "export", "formats": ["gptq"]}]))
    assert "[dense-weights]" in err


@pytest.mark.parametrize(
    ("score", "compensate"),
    [
        *((score, "least_squares") for score in SCORERS.names()),
        *(("taylor", each) for each in COMPENSATIONS.names() if each != "least_squares"),
    ],
)
@pytest.mark.one_in(3)
def test_every_score_and_every_compensation_leaves_a_model(
    score: str, compensate: str, recipe: Callable[..., Path], command: Command, work: Path
) -> None:
    pruned = run(command, recipe(stages=stages(4, **BY_HAND, score=score, compensate=compensate)), work)
    rows = pruned.manifest.facts["pruning"]["rounds"][0]["layers"]
    assert [(row["layer"], row["linear"]) for row in rows] == [
        (idx, name) for idx in range(NUM_LAYERS) for name in ("attn.o", "ffn.down")
    ]
    assert all(0 < row["error"] < 1.5 for row in rows)
    arch = open_weights(pruned.path).arch
    assert (arch.o_bias, arch.ffn_bias) == ((True, True) if compensate == "bias" else (False, False))
    decoder = build_decoder(open_weights(pruned.path), dtype=torch.float32, device=torch.device("cpu"))
    assert bool(torch.isfinite(decoder(torch.arange(12).view(1, -1))).all())


def test_compensation_lowers_the_error_that_is_left(
    recipe: Callable[..., Path], command: Command, work: Path
) -> None:
    def errors(compensate: str) -> list[float]:
        spec = stages(8, ffn={"keep": 0.75}, multiple=32, score="activation", compensate=compensate)
        facts = run(command, recipe(stages=spec), work, compensate).manifest.facts["pruning"]
        return [row["error"] for row in facts["rounds"][0]["layers"]]

    nothing = errors("none")
    bias = errors("bias")
    squares = errors("least_squares")
    assert bias[0] < nothing[0]  # of the first layer, where all three see the same inputs
    assert squares[0] < nothing[0]


def test_query_heads_of_every_group_and_rounds(
    recipe: Callable[..., Path], command: Command, work: Path
) -> None:
    spec = {
        "heads": {"keep": 2, "unit": "query_head"},
        "ffn": {"keep": 128},
        "depth": {"keep": 2},
        "multiple": 32,
        "rounds": 2,
    }
    pruned = run(
        command,
        recipe(stages=[*stages(**spec), QUANTIZE, {"kind": "export"}, {**VALIDATE, "gates": {}}]),
        work,
    )
    facts = pruned.manifest.facts["pruning"]
    assert [facts["after"][name] for name in ("heads", "kv_heads", "ffn", "layers")] == [2, 2, 128, 2]
    first, second = facts["rounds"]
    assert (len(first["layers_kept"]), len(second["layers_kept"])) == (3, 2)  # half of one layer is none yet
    assert [
        {row["num_kept"] for row in each["layers"] if row["linear"] == "ffn.down"} for each in (first, second)
    ] == [{192}, {128}]
    page = (work / "run" / "evidence" / "report.html").read_text()
    assert 'class="plot pruned_depth"' in page


def test_depth_alone_keeps_the_layers_that_do_most_as_they_are(
    recipe: Callable[..., Path], command: Command, work: Path, model_dir: Path
) -> None:
    pruned = run(command, recipe(stages=stages(depth={"keep": 2})), work)
    facts = pruned.manifest.facts["pruning"]["rounds"][0]
    influence = facts["influence"]
    kept = facts["layers_kept"]
    assert min(influence[idx] for idx in kept) >= max(
        influence[idx] for idx in range(NUM_LAYERS) if idx not in kept
    )
    source = open_weights(model_dir)
    small = open_weights(pruned.path)
    for place, idx in enumerate(kept):
        for name, value in source.layer(idx).items():
            assert torch.equal(dense(small.layer(place)[name]), dense(value)), name


@pytest.mark.parametrize(
    ("spec", "every"),
    [
        ({**BY_HAND, "rounds": 2, "score": "taylor"}, 7),
        ({"target": {"params_frac": 0.8, "num_samples": 4}, "multiple": 32, "score": "activation"}, 7),
        ({"depth": {"keep": 2}, "ffn": {"keep": 0.75}, "multiple": 32}, 4),
    ],
    ids=["rounds", "target", "depth"],
)
@pytest.mark.one_in(16)
def test_a_run_that_is_cut_anywhere_ends_in_the_same_bytes(
    spec: dict[str, Any],
    every: int,
    recipe: Callable[..., Path],
    command: Command,
    work: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """At every so many boundaries; what lies between two of them, where nothing can be cut, is shorter."""
    from compress.context import Context

    path = recipe(stages=stages(**spec))
    undisturbed = run(command, path, work, "undisturbed").digest
    boundary = Context.boundary
    calls = 0

    def cut(self: Context, done: int, total: int, note: str) -> None:
        nonlocal calls
        calls += 1
        if calls % every == 0:
            raise KeyboardInterrupt
        boundary(self, done, total, note)

    monkeypatch.setattr(Context, "boundary", cut)
    for _ in range(40):
        code, _, _ = command("run", path, "--workspace", work / "cut-ws", "--run-dir", work / "cut")
        if code == 0:
            break
    assert code == 0
    assert calls > every
    assert open_artifact(work / "cut" / "artifacts" / "prune").digest == undisturbed


@pytest.mark.parametrize(
    "spec",
    [
        slow({**BY_HAND, "rounds": 2, "score": "taylor"}),
        {"target": {"params_frac": 0.8, "num_samples": 4, "prune": ["ffn", "depth"]}, "multiple": 32},
    ],
    ids=["rounds", "target"],
)
@pytest.mark.slow
def test_two_ranks_give_the_artifact_of_one(
    spec: dict[str, Any], recipe: Callable[..., Path], command: Command, work: Path
) -> None:
    path = recipe(stages=[*stages(11, **spec), QUANTIZE])
    results = launch(2, "run", path, "--workspace", "many", "--json")
    alone = launch(1, "run", path, "--workspace", "one", "--json")
    assert digest(results[0]) == digest(alone[0])
    assert (results[1].returncode, results[1].stdout, results[1].stderr) == (0, "", "")


def test_a_target_is_kept_and_explained(recipe: Callable[..., Path], command: Command, work: Path) -> None:
    target = {"params_frac": 0.8, "num_samples": 4}
    path = recipe(
        stages=[*stages(target=target, multiple=32), QUANTIZE, {"kind": "export"}, {**VALIDATE, "gates": {}}]
    )
    pruned = run(command, path, work)
    facts = pruned.manifest.facts["pruning"]
    found = facts["target"]
    assert facts["after"]["params"] <= 0.8 * facts["before"]["params"]
    assert found["chosen"]["cost"] == pytest.approx(
        facts["after"]["params"] / facts["before"]["params"], abs=1e-5
    )
    assert {each["axis"] for each in found["measured"]} == {"heads", "ffn", "depth"}
    costs = [each["cost"] for each in found["frontier"]]
    losses = [each["kl"] for each in found["frontier"]]
    assert costs == sorted(costs)
    assert losses == sorted(losses, reverse=True)
    assert (costs[-1], losses[-1]) == (1.0, 0.0)
    kept = [each for each in found["frontier"] if each["cost"] <= 0.8]
    assert kept[-1]["kl"] == found["chosen"]["kl"]
    assert 'class="plot pruned_target"' in (work / "run" / "evidence" / "report.html").read_text()


@pytest.mark.parametrize("device", [None, "NVIDIA H200"])
def test_a_target_of_time_counts_the_kernels_of_the_device(
    device: str | None, recipe: Callable[..., Path], command: Command, work: Path
) -> None:
    where = {} if device is None else {"device": device}
    target = {"latency_frac": 0.9, "num_samples": 4, "prune": ["ffn", "depth"], **where}
    facts = run(
        command, recipe(stages=stages(target=target, multiple=64, score="activation")), work
    ).manifest.facts["pruning"]
    assert facts["target"]["chosen"]["cost"] <= 0.9
    assert facts["target"]["cost"] == "time"


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ({}, "nothing is to go"),
        ({"ffn": {"keep": 1.5}}, "ffn"),
        ({"ffn": {"keep": 0}}, "ffn"),
        ({"ffn": {"keep": 300}, "multiple": 32}, "300 are to stay and the model has 256"),
        (
            {"ffn": {"keep": 0.99}, "multiple": 32},
            "leaves all 256: nothing would go. The next smaller legal number is 224",
        ),
        (
            {"heads": {"keep": 0.5}},
            "leaves all 4: nothing would go. There is no smaller legal number with `multiple: 128`",
        ),
        ({"ffn": {"keep": 0.5}, "target": {"params_frac": 0.5}}, "target decides what ffn would say"),
        ({"target": {"params_frac": 0.5, "latency_frac": 0.5}}, "one of params_frac and latency_frac"),
        ({"target": {"params_frac": 0.5, "rows": 4}}, "neither rows nor device"),
        ({"target": {"latency_frac": 0.5, "device": "NVIDIA H20"}}, "Did you mean 'NVIDIA H200'"),
        ({"target": {"params_frac": 0.5, "prune": ["ffn", "ffn"]}}, "every axis once"),
        ({"ffn": {"keep": 0.5}, "score": "activations"}, "Did you mean 'activation'"),
        ({"ffn": {"keep": 0.5}, "compensate": {"kind": "least_squares", "dampening": 1}}, "dampening"),
        ({"depth": {"keep": 2, "score": "block"}}, "block_influence"),
        ({"depth": {"keep": 3}}, "leaves all 3"),
    ],
)
def test_what_cannot_be_pruned_is_refused_by_the_plan(
    spec: dict[str, Any], message: str, recipe: Callable[..., Path], command: Command
) -> None:
    err = refused(command, recipe(stages=stages(**spec)))
    assert message in err, err


def test_a_group_that_does_not_divide_what_is_left_is_refused_by_the_plan(
    recipe: Callable[..., Path], command: Command
) -> None:
    path = recipe(stages=[*stages(ffn={"keep": 0.7}, multiple=32), {**QUANTIZE, "scheme": "W4A16_G128"}])
    assert re.search(
        r"quantize: W4A16_G128 needs K to be a multiple of 128, and layers.0.ffn.down "
        r"\(one of 3 such linears\) has K = 192\..*`dense` by overrides",
        refused(command, path),
    )


def test_a_target_whose_widths_a_group_may_not_divide_is_refused_by_the_plan(
    recipe: Callable[..., Path], command: Command
) -> None:
    path = recipe(
        stages=[*stages(target={"params_frac": 0.8}, multiple=32), {**QUANTIZE, "scheme": "W4A16_G128"}]
    )
    assert "`multiple: 32` may leave widths that the groups of W4A16_G128 do not divide" in refused(
        command, path
    )


def test_a_quantized_model_is_refused(recipe: Callable[..., Path], command: Command, work: Path) -> None:
    assert (
        command("run", recipe(stages=[CALIBRATE, QUANTIZE, {"kind": "export"}]), "--run-dir", work / "first")[
            0
        ]
        == 0
    )
    path = recipe(model=str((work / "first" / "artifacts" / "export").resolve()), stages=stages(**BY_HAND))
    assert "quantized already" in refused(command, path)


def test_a_target_that_cannot_be_kept_is_refused(recipe: Callable[..., Path], command: Command) -> None:
    path = recipe(stages=stages(target={"params_frac": 0.1, "num_samples": 4}, multiple=32))
    assert "cannot be kept: with half of heads, ffn, depth the model still costs" in refused(
        command, path, by="run"
    )
    path = recipe(stages=stages(3, target={"params_frac": 0.8, "num_samples": 16}, multiple=32))
    assert "calibration samples and there are 3" in refused(command, path, by="run")


def test_a_llama_keeps_a_number_of_heads_that_divides_its_hidden_size(
    recipe: Callable[..., Path], command: Command, work: Path
) -> None:
    """`transformers` refuses others; for a shape of 13 billion parameters 28 of 40 heads become 32."""
    from compress.models.family import family_of
    from compress.models.known import known_config
    from compress.models.pruning import as_mistral
    from compress.stages.prune.widths import legal_heads

    config = known_config("llama-2-13b")
    assert config is not None
    assert legal_heads(family_of(config).read_config(config), "kv_group", 128) == [
        1,
        2,
        4,
        5,
        8,
        10,
        16,
        20,
        32,
        40,
    ]
    assert 28 in legal_heads(as_mistral(family_of(config).read_config(config)), "kv_group", 128)
    path = recipe(stages=stages(heads={"keep": 0.5, "unit": "query_head"}, multiple=32, as_mistral=True))
    code, out, err = command("plan", path, "--json")
    assert code == 0, err
    assert "heads 4 -> 2; " in out  # KV heads stay
    assert open_weights(run(command, path, work).path).arch.family == "mistral"
