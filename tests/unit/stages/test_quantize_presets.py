"""A preset is shorthand: it says the same as the keys it stands for, explicit keys win, and nothing that is
kept remembers it.
"""

from typing import Any

import pytest

from compress.errors import RecipeError
from compress.recipe import parse_spec, read_yaml
from compress.stages import STAGES, PlanFacts
from compress.stages.quantize.spec import PRESETS, Quantize
from tests.support.tiny_decoder import QWEN3, tiny_arch

EACH_PRESET = pytest.mark.parametrize("preset", PRESETS)
METHOD_KEYS = {"guide", "smooth", "target", "round", "refine", "true_sequential", "tune"}


def parsed(text: str) -> Quantize:
    raw, where = read_yaml(text, file="r.yaml")
    return parse_spec(Quantize, raw, where)


def kept(spec: Quantize) -> dict[str, Any]:
    """As cache keys and manifests keep it."""
    return spec.model_dump(mode="json", serialize_as_any=True)


@EACH_PRESET
def test_a_preset_is_what_its_keys_say(preset: str) -> None:
    written_out = Quantize.model_validate(PRESETS[preset])
    assert PRESETS[preset].keys() <= METHOD_KEYS
    assert kept(parsed(f"preset: {preset}")) == kept(written_out)
    assert parsed(f"{{preset: {preset}, scheme: W8A16}}").scheme == "W8A16"


@EACH_PRESET
def test_a_lock_of_a_preset_runs_the_same_again(preset: str) -> None:
    for text in (
        f"preset: {preset}",
        f"{{preset: {preset}, refine: null}}",
        f"{{preset: {preset}, refine: {{kind: descent, sweeps: 9}}}}",
    ):
        spec = parsed(text)
        lock = spec.model_dump(mode="json")
        assert "preset" not in lock
        assert kept(Quantize.model_validate(lock)) == kept(spec)


def test_an_explicit_key_replaces_what_the_preset_has_under_it() -> None:
    balanced = parsed("preset: balanced")
    assert balanced.refine is not None
    assert parsed("{preset: balanced, refine: null}").refine is None
    assert parsed("{preset: balanced, refine: null}").round == balanced.round
    other = parsed("{preset: balanced, round: {kind: rtn}, smooth: {kind: awq}}")
    assert (other.round.model_dump()["kind"], other.refine) == ("rtn", balanced.refine)
    assert other.smooth is not None
    assert kept(parsed("{preset: null}")) == kept(Quantize())


def test_presets_differ() -> None:
    assert len({parsed(f"preset: {each}").method() for each in PRESETS}) == len(PRESETS) > 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{preset: balancd}", "r.yaml:1:2: preset: unknown preset 'balancd'. Did you mean 'balanced'?"),
        ("{preset: [fast]}", "r.yaml:1:2: preset: "),
        (
            "{preset: balanced, round: {kind: gptq, dampng: 1}}",
            "r.yaml:1:40: round.dampng: unknown key. Did you mean 'damping'?",
        ),
        (
            "{preset: fast, refine: {kind: descnt}}",
            "r.yaml:1:25: refine.kind: unknown kind 'descnt'. Did you mean 'descent'?",
        ),
    ],
)
def test_errors_beside_a_preset_stand_where_the_file_has_them(text: str, message: str) -> None:
    with pytest.raises(RecipeError) as error:
        parsed(text)
    assert str(error.value).startswith(message)


@EACH_PRESET
def test_the_plan_says_what_a_preset_stands_for(preset: str) -> None:
    facts = PlanFacts(tiny_arch(QWEN3), "cpu", {})
    plan = STAGES.get("quantize").estimate
    notes = plan(parsed(f"{{scheme: W8A16, preset: {preset}}}"), facts).notes
    for key, settings in PRESETS[preset].items():
        said = key if settings is True else f"{key}: {settings['kind']} ("
        assert any(note.startswith(f"{preset}: ") and said in note for note in notes)
    assert "sweeps 7" in " ".join(
        plan(
            parsed(f"{{scheme: W8A16, preset: {preset}, refine: {{kind: descent, sweeps: 7}}}}"), facts
        ).notes
    )


def test_the_second_stream_of_a_target_is_in_the_estimate() -> None:
    facts = PlanFacts(tiny_arch(QWEN3), "cuda", {})
    without, beside = (
        STAGES.get("quantize").estimate(Quantize.model_validate({"scheme": "W8A16", "target": target}), facts)
        for target in (None, {"kind": "gptaq"})
    )
    assert without.flops < beside.flops < 2 * without.flops
    activations = 2 * 128 * 512 * facts.arch.hidden_size
    assert beside.peak_bytes - without.peak_bytes >= activations
    assert "target: gptaq (strength 0.5, damping 0.01)" in " ".join(beside.notes)


def test_every_sweep_is_in_the_estimate() -> None:
    facts = PlanFacts(tiny_arch(QWEN3), "cuda", {})
    found = [
        STAGES.get("quantize").estimate(Quantize.model_validate({"scheme": "W8A16", "refine": refine}), facts)
        for refine in (None, {"kind": "descent", "sweeps": 1}, {"kind": "descent", "sweeps": 2})
    ]
    assert found[0].flops < found[1].flops < found[2].flops
    assert found[2].flops - found[1].flops == pytest.approx(found[1].flops - found[0].flops)
    assert found[0].num_launches < found[1].num_launches < found[2].num_launches


@pytest.mark.parametrize("scheme", ["NVFP4", "MXFP4", "FP8_BLOCK"])
def test_schemes_without_scales_to_train_are_not_tuned(scheme: str) -> None:
    best = parsed(f"{{preset: best, scheme: {scheme}}}")
    assert best.tune is None
    assert best.refine is not None
    mixed = f"{{preset: best, scheme: {scheme}, overrides: {{'*.ffn.down': W8A16}}}}"
    assert parsed(mixed).tune is not None, "one linear has scales to train"
    with pytest.raises(RecipeError, match="no scales to train"):
        parsed(f"{{scheme: {scheme}, tune: {{kind: scales}}}}")
