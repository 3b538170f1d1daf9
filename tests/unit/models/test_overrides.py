"""Per-layer overrides: the first pattern that matches decides, what decides nothing is refused, and linears
over one input agree.
"""

import itertools
from fnmatch import fnmatchcase
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from compress.artifact.workspace import Workspace
from compress.errors import RecipeError, UsageError
from compress.models.overrides import decide, described, linear_names, linears_by_input, overridden
from compress.models.weights import build_layer
from compress.quant.model_scheme import ModelScheme, commonest, with_exceptions
from compress.quant.scheme import SCHEMES, Scheme
from compress.recipe import dump_yaml, parse_spec, read_yaml
from compress.stages import STAGES, PlanFacts
from compress.stages.quantize.schemes import linear_bytes, model_scheme
from compress.stages.quantize.spec import Quantize
from tests.support.tiny_decoder import LLAMA, tiny_arch, tiny_source

ARCH = tiny_arch(LLAMA)
NAMES = linear_names(ARCH)
W8, FP8, INT8 = (SCHEMES[name] for name in ("W8A16", "FP8_DYNAMIC", "INT8_DYNAMIC"))
STAGE = STAGES.get("quantize")


def parsed(text: str) -> Quantize:
    raw, where = read_yaml(text, file="r.yaml")
    return parse_spec(Quantize, raw, where)


def test_names_are_those_of_the_decoder() -> None:
    layer = build_layer(ARCH, 0, tiny_source(ARCH).layer(0), dtype=torch.float32, device=torch.device("cpu"))
    assert [tuple(f"layers.0.{name}" for name in group.linears) for group in layer.groups()] == list(
        linears_by_input(ARCH)
    )[:4]
    assert sorted(name for group in linears_by_input(ARCH) for name in group) == sorted(NAMES)


def test_the_first_pattern_that_matches_decides() -> None:
    scheme = overridden(W8, {"layers.1.ffn.down": None, "*.down": FP8, "layers.2.*": INT8}, ARCH)
    assert scheme.for_linear("layers.0.ffn.down") == FP8
    assert scheme.for_linear("layers.1.ffn.down") is None
    assert scheme.for_linear("layers.2.ffn.down") == FP8
    assert scheme.for_linear("layers.2.attn.q") == INT8
    assert scheme.for_linear("layers.0.attn.q") == W8
    assert (scheme.for_linear("head"), scheme.dense, set(scheme.of_layers)) == (
        None,
        ("layers.1.ffn.down",),
        {W8, FP8, INT8},
    )


def test_braces_name_several_linears_at_once() -> None:
    decided = decide({"layers.1.{ffn.{gate,up},attn.[qkv]}": FP8, "*.ffn.{gate,up}": INT8}, ARCH)
    assert {name for name, scheme in decided.items() if scheme == FP8} == {
        f"layers.1.{name}" for name in ("ffn.gate", "ffn.up", "attn.q", "attn.k", "attn.v")
    }
    assert decided["layers.0.ffn.up"] == decided["layers.2.ffn.gate"] == INT8
    with pytest.raises(UsageError, match="matches no linear"):
        decide({"*.ffn.{left,right}": FP8}, ARCH)


PATTERNS = st.sampled_from(
    [*NAMES, "*", "*.down", "*.attn.*", "layers.[01].*", "layers.2.ffn.*", "*.attn.[qkv]"]
)


@settings(deadline=None)  # machines are busy
@given(st.dictionaries(PATTERNS, st.sampled_from([None, FP8, INT8]), max_size=4))
def test_deciding_is_asking_the_patterns_in_order_for_each_linear(
    overrides: dict[str, Scheme | None],
) -> None:
    """Against the definition, linear by linear."""
    first = {
        name: next((pattern for pattern in overrides if fnmatchcase(name, pattern)), None) for name in NAMES
    }
    if set(overrides) <= set(first.values()):
        assert decide(overrides, ARCH) == {
            name: overrides[pattern] for name, pattern in first.items() if pattern is not None
        }
    else:
        with pytest.raises(UsageError, match="decides nothing"):
            decide(overrides, ARCH)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"*.ffn.dwn": None}, r"'\*\.ffn\.dwn' matches no linear\. Did you mean '\*\.ffn\.down'"),
        (
            {"layers.3.ffn.down": None},
            r"'layers\.3\.ffn\.down' matches no linear\. Did you mean 'layers\.\d\.ffn\.down'",
        ),
        ({"experts": None}, r"Known: \*\.attn\.k, .*\*\.ffn\.up\."),
        ({"head": FP8}, "key of its own, `head`"),
        ({"*.down": None, "layers.0.ffn.down": FP8}, r"'layers\.0\.ffn\.down' decides nothing"),
        ({"*.ffn.up": None}, r"layers\.0\.ffn\.gate W8A16, layers\.0\.ffn\.up dense"),
        ({"layers.1.attn.[qk]": FP8}, r"layers\.1\.attn\.k FP8_DYNAMIC, layers\.1\.attn\.v W8A16"),
        ({"*": None}, "nothing to quantize"),
    ],
)
def test_what_cannot_be_meant_is_refused(overrides: dict[str, Scheme | None], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        overridden(W8, overrides, ARCH)


def test_an_unknown_scheme_is_refused_where_it_stands() -> None:
    with pytest.raises(
        RecipeError, match=r"r\.yaml:1:\d+: overrides.*unknown scheme 'dens'\. Did you mean 'dense'"
    ):
        parsed("{overrides: {'*.down': dens}}")


def test_smoothing_is_refused_only_if_it_does_nothing_for_any_linear() -> None:
    assert (
        parsed("{scheme: FP8_DYNAMIC, overrides: {'*.down': W8A16}, smooth: {kind: awq}}").smooth is not None
    )
    with pytest.raises(RecipeError, match="awq does nothing for FP8_DYNAMIC and FP8_STATIC: it gives"):
        parsed("{scheme: FP8_DYNAMIC, overrides: {'*.down': FP8_STATIC, '*.o': dense}, smooth: {kind: awq}}")


def key(spec: Quantize) -> str:
    return Workspace.key(
        "quantize", 1, spec.model_dump(mode="json", serialize_as_any=True), {}, 0, STAGE.depends(spec, "cpu")
    )


def test_the_order_of_patterns_is_part_of_the_key_and_no_override_leaves_it_alone() -> None:
    texts = ["'*.down': FP8_STATIC", "'layers.*': dense", "'*.o': FP8_DYNAMIC"]
    keys = {key(parsed(f"{{overrides: {{{', '.join(order)}}}}}")) for order in itertools.permutations(texts)}
    assert len(keys) == 6
    assert key(parsed("{overrides: {}}")) == key(parsed("{}"))
    assert "overrides" not in parsed("{}").model_dump()


def test_a_lock_keeps_the_order() -> None:
    spec = parsed("{overrides: {'layers.1.*': dense, '*.down': FP8_STATIC, '*': W8A16}}")
    again = parsed(dump_yaml(spec.model_dump(mode="json", exclude_none=True)))
    assert (list(again.overrides.items()), key(again)) == (list(spec.overrides.items()), key(spec))


SOME: st.SearchStrategy[Any] = st.dictionaries(
    st.sampled_from(NAMES), st.sampled_from([None, W8, FP8, SCHEMES["FP8_STATIC"]])
)


@settings(deadline=None)  # machines are busy
@given(SOME, st.sampled_from([None, FP8]))
def test_schemes_of_single_linears_survive_json_and_naming(
    schemes: dict[str, Scheme | None], head: Scheme | None
) -> None:
    whole = with_exceptions(W8, schemes, head=head)
    assert ModelScheme.from_json(whole.to_json()) == whole
    assert {name: whole.for_linear(name) for name in NAMES} == {name: schemes.get(name, W8) for name in NAMES}
    assert ("exceptions" in whole.to_json()) == any(scheme != W8 for scheme in schemes.values())
    again = whole.renamed(lambda name: [f"x.{name}"]).renamed(lambda name: [name[2:]])
    assert again == whole
    everywhere = {name: whole.for_linear(name) for name in NAMES}
    if any(everywhere.values()):
        assert all(
            commonest(everywhere, head=head).for_linear(name) == scheme for name, scheme in everywhere.items()
        )


def test_a_manifest_says_of_each_layer_what_differs_there() -> None:
    scheme = overridden(W8, {"layers.1.*": None, "layers.2.ffn.down": FP8}, ARCH)
    _, layers = described(ARCH, scheme)
    assert [(layer["scheme"], layer.get("exceptions")) for layer in layers] == [
        ("W8A16", None),
        ("dense", None),
        ("W8A16", {"ffn.down": "FP8_DYNAMIC"}),
    ]


@pytest.mark.parametrize(("dtype", "itemsize"), [("bfloat16", 2), ("float32", 4)])
def test_the_plan_counts_dense_linears_and_scales_in_the_dtype_of_the_model(
    dtype: str, itemsize: int
) -> None:
    arch = ARCH.replace(dtype=dtype)
    facts = PlanFacts(arch, "cpu", {})
    specs = [
        parsed(f"{{scheme: W8A16, overrides: {over}}}")
        for over in ("{}", "{'*.down': dense}", "{'*.down': W4A16_CHANNEL}")
    ]
    plain, dense, four = (STAGE.estimate(spec, facts) for spec in specs)
    size = sum(
        layer.linear_shape("ffn.down", ARCH.hidden_size)[0] * layer.intermediate_size for layer in ARCH.layers
    )
    scales = itemsize * ARCH.hidden_size * ARCH.num_layers
    assert dense.disk_bytes - plain.disk_bytes == itemsize * size - (size + scales)
    assert plain.disk_bytes - four.disk_bytes == size // 2
    assert any("3 linears dense" in note for note in dense.notes)
    assert linear_bytes(arch, model_scheme(specs[1], arch)) < dense.disk_bytes
