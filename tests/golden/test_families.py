"""Our decoder computes what `transformers` computes, for every family and variant, and a checkpoint goes
through it unchanged.
"""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor

from compress.models.attention import CachedAttention
from compress.models.checkpoint import Checkpoint
from compress.models.checkpoint_writer import write_checkpoint
from compress.models.config_file import read_config
from compress.models.config_values import SAME_ACTIVATIONS
from compress.models.family import FAMILIES, family_of
from compress.models.rope import cos_sin, inverse_frequencies
from compress.models.stored_tensors import members_of, other_experts
from compress.models.weights import build_decoder, parameter_names
from tests.support.tiny_cases import CASES
from tests.support.tiny_cases.facts import LLAMA3
from tests.support.tiny_families import ATTENTION_FREE, BY_ANOTHER_NAME, CONFIGS, NEEDED, SMALL, TEXT_FAMILIES
from tests.support.tiny_hf import (
    FIXED_ACTIVATIONS,
    OWN_EPS,
    TWICE_IN_WINDOWS,
    build,
    kv_heads_of,
    ropes_of,
    saved,
    tokens,
    types_of,
    window_of,
)

SEQ_LEN = 24
PREDICTORS = "num_nextn_predict_layers"
CPU = torch.device("cpu")


def tolerance(reference: Tensor) -> float:
    """Every layer adds roundings of dot products over at most 80 features and of the softmax; their order
    differs between the two sides.
    """
    roundings = 8 * SMALL["num_hidden_layers"] + 2
    return (
        roundings
        * torch.finfo(torch.float32).eps
        * SMALL["intermediate_size"] ** 0.5
        * float(reference.abs().max())
    )


def tensors_of(directory: Path) -> dict[str, Tensor]:
    return {
        name: tensor
        for file in sorted(directory.glob("*.safetensors"))
        for name, tensor in load_file(file).items()
    }


def assert_same_tensors(one: Path, other: Path) -> None:
    ours = tensors_of(one)
    theirs = tensors_of(other)
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert ours[name].dtype == tensor.dtype
        assert torch.equal(ours[name], tensor), name


def test_every_family_has_a_golden_case() -> None:
    assert set(FAMILIES.names()) - BY_ANOTHER_NAME.keys() == {family for family, _ in CASES.values()}


def test_the_documents_name_every_family() -> None:
    text = (Path(__file__).parents[2] / "docs" / "extend.md").read_text(encoding="utf-8").lower()
    assert [family for family in FAMILIES.names() if family.lower() not in text] == []


@pytest.mark.parametrize("case", CASES)
@pytest.mark.one_in(3)
def test_logits_equal_those_of_transformers_in_prefill_and_in_cached_decode(
    case: str, tmp_path: Path
) -> None:
    model = saved(tmp_path, *CASES[case])
    decoder = build_decoder(Checkpoint(tmp_path), dtype=torch.float32, device=CPU)
    tokens_BS = tokens(2, SEQ_LEN)
    steps = [(0, 9), (9, 13), *((i, i + 1) for i in range(13, SEQ_LEN))]
    with torch.no_grad():
        expected = model(tokens_BS).logits
        prefill = decoder(tokens_BS)
        cache = CachedAttention()
        pieces = []
        for begin, end in steps:
            assert cache.length == (0 if CASES[case][0] in ATTENTION_FREE else begin)
            pieces.append(decoder(tokens_BS[:, begin:end], torch.arange(begin, end), cache))
        decoded = _decoded_by_transformers(model, tokens_BS, steps) if "longrope" in case else expected
    # The norm of a delta net divides by the size of what a query finds in the state, which may be near
    # nothing.
    atol = tolerance(expected) * (4 if "linear_value_head_dim" in CASES[case][1] else 1)
    assert (prefill - expected).abs().max() <= atol
    assert (torch.cat(pieces, dim=1) - decoded).abs().max() <= atol
    assert (
        expected - expected.roll(1, dims=1)
    ).abs().max() > 1000 * atol  # the tolerance tells positions apart


def _decoded_by_transformers(model: Any, tokens_BS: Tensor, steps: list[tuple[int, int]]) -> Tensor:
    """Return the logits of a cached decode; LongRoPE's cached keys keep the frequencies of their step."""
    past = None
    pieces = []
    for begin, end in steps:
        out = model(tokens_BS[:, begin:end], past_key_values=past, use_cache=True)
        past = out.past_key_values
        pieces.append(out.logits)
    return torch.cat(pieces, dim=1)


@pytest.mark.parametrize(
    "case", ["cwm", "exaone_moe", "vaultgemma", "mellum-types-yarn", "gemma2-narrow-caps", "exaone4"]
)
def test_a_field_that_the_model_does_not_read_switches_no_window_off(case: str, tmp_path: Path) -> None:
    """`use_sliding_window` is a field of Qwen's models alone."""
    saved(tmp_path, *CASES[case])
    config = json.loads((tmp_path / "config.json").read_text())
    as_it_is = family_of(config).read_config(config)
    assert any(layer.window is not None for layer in as_it_is.layers)
    spoiled = {**config, "use_sliding_window": False}
    assert family_of(spoiled).read_config(spoiled).layers == as_it_is.layers
    assert "use_sliding_window" in family_of(spoiled).unread_fields(spoiled)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.one_in(12)
def test_export_after_import_is_the_identity(case: str, tmp_path: Path) -> None:
    family, changes = CASES[case]
    model = saved(tmp_path / "source", family, changes, dtype=torch.bfloat16)
    source = Checkpoint(tmp_path / "source")
    (tmp_path / "written").mkdir()
    write_checkpoint(tmp_path / "written", source)
    assert_same_tensors(tmp_path / "written", tmp_path / "source")
    again = Checkpoint(tmp_path / "written")
    assert again.arch.replace(config={}) == source.arch.replace(config={})
    meaning = type(model.config).from_pretrained(tmp_path / "written").to_dict()
    original = type(model.config).from_pretrained(tmp_path / "source").to_dict()
    for volatile in ("transformers_version", "_name_or_path"):
        meaning.pop(volatile, None), original.pop(volatile, None)
    sizes = {**SMALL, **changes}
    thinkers = [each.get("thinker_config", each) for each in (meaning, original)]
    mtp = source.family.mtp
    drops_count = mtp is None or not mtp.count_decides
    for ours, theirs in ((meaning, original), [each.get("text_config") for each in thinkers]):
        # `transformers` counts them, and writes none
        if ours is not None and theirs.get(PREDICTORS) and drops_count:
            assert theirs.pop(PREDICTORS) > ours.pop(PREDICTORS) == 0
        if ours is not None and theirs.get("head_dim") is None and "head_dim" in ours:
            assert ours.pop("head_dim") == sizes["hidden_size"] // sizes["num_attention_heads"]
            theirs.pop("head_dim", None)
    assert meaning == original


def test_shards_are_read_and_written(tmp_path: Path) -> None:
    saved(tmp_path / "source", "llama", {}, max_shard_size="40KB")
    assert len(list((tmp_path / "source").glob("*.safetensors"))) > 2
    (tmp_path / "written").mkdir()
    write_checkpoint(tmp_path / "written", Checkpoint(tmp_path / "source"), max_shard_bytes=50_000)
    assert len(list((tmp_path / "written").glob("*.safetensors"))) > 2
    assert_same_tensors(tmp_path / "written", tmp_path / "source")
    Checkpoint(tmp_path / "written")


REAL_ROPES: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default", "rope_theta": 1e6},
    "linear": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0},
    "llama-3.1": {**LLAMA3, "rope_theta": 500000.0, "original_max_position_embeddings": 8192},
    "llama-3.2": {**LLAMA3, "rope_theta": 500000.0, "original_max_position_embeddings": 8192, "factor": 32.0},
    "qwen-yarn": {
        "rope_type": "yarn",
        "rope_theta": 1e6,
        "factor": 4.0,
        "original_max_position_embeddings": 32768,
    },
    "yarn-untruncated": {
        "rope_type": "yarn",
        "rope_theta": 1e4,
        "factor": 32.0,
        "original_max_position_embeddings": 4096,
        "truncate": False,
    },
}


@pytest.mark.parametrize("name", REAL_ROPES)
@pytest.mark.parametrize("head_dim", [64, 128])
def test_frequencies_of_real_models_are_those_of_transformers(name: str, head_dim: int) -> None:
    """At full size, where every band of the rescaling has members and positions are long."""
    said = {"rope_parameters": REAL_ROPES[name], "max_position_embeddings": 131072, "head_dim": head_dim}
    rope = (
        family_of({"model_type": "llama"})
        .read_config({"model_type": "llama", **SMALL, **said})
        .layers[0]
        .rope
    )
    embedding = build("llama", said).model.rotary_emb
    positions = torch.arange(0, 131072, 1021)
    cos, sin = cos_sin(rope, head_dim, positions, torch.float32)
    their_cos, their_sin = embedding(torch.zeros(1, 1), positions.unsqueeze(0))
    assert torch.allclose(
        inverse_frequencies(rope, head_dim),
        embedding.inv_freq,
        rtol=4 * torch.finfo(torch.float32).eps,
        atol=0,
    )
    atol = (
        4 * torch.finfo(torch.float32).eps * 131072
    )  # an angle is a position times a frequency, rounded once each
    assert torch.allclose(cos, their_cos[0], rtol=0, atol=atol)
    assert torch.allclose(sin, their_sin[0], rtol=0, atol=atol)


OLD_SPELLINGS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "theta": ({"rope_theta": 5000.0}, {"rope_type": "default", "rope_theta": 5000.0}),
    "llama3": (
        {
            "rope_theta": 10000.0,
            "rope_scaling": {key: value for key, value in LLAMA3.items() if key != "rope_theta"},
        },
        LLAMA3,
    ),
    "type-linear": (
        {"rope_theta": 10000.0, "rope_scaling": {"type": "linear", "factor": 2.0}},
        {"rope_type": "linear", "factor": 2.0},
    ),
    "original-length-of-the-config": (
        {
            "rope_theta": 10000.0,
            "rope_scaling": {**LLAMA3, "original_max_position_embeddings": 3},
            "original_max_position_embeddings": LLAMA3["original_max_position_embeddings"],
        },
        LLAMA3,
    ),
    # YaRN's own program multiplies, and transformers takes the whole
    "yarn-with-a-factor": (
        {
            "rope_theta": 10000.0,
            "rope_scaling": {
                "rope_type": "yarn",
                "factor": 4.0,
                "attn_factor": 1.25,
                "original_max_position_embeddings": 16,
            },
        },
        {
            "rope_type": "yarn",
            "factor": 4.0,
            "attention_factor": 1.25 * (0.1 * math.log(4.0) + 1),
            "original_max_position_embeddings": 16,
        },
    ),
    "yarn-without-original-length": (
        {"rope_theta": 10000.0, "rope_scaling": {"type": "yarn", "factor": 4.0}},
        {
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": SMALL["max_position_embeddings"],
        },
    ),
}


@pytest.mark.parametrize("spelling", OLD_SPELLINGS)
def test_configs_written_before_transformers_5_mean_the_same(spelling: str, tmp_path: Path) -> None:
    old, new = OLD_SPELLINGS[spelling]
    model = saved(tmp_path, "llama", {"rope_parameters": {"rope_theta": 10000.0, **new}})
    config = read_config(tmp_path)
    modern = Checkpoint(tmp_path).arch
    del config["rope_parameters"]
    config.pop("dtype")
    (tmp_path / "config.json").write_text(json.dumps({**config, **old, "torch_dtype": "float32"}))
    source = Checkpoint(tmp_path)
    assert source.arch.replace(config={}) == modern.replace(config={})
    with torch.no_grad():
        expected = model(tokens(1, SEQ_LEN)).logits
        actual = build_decoder(source, dtype=torch.float32, device=CPU)(tokens(1, SEQ_LEN))
    assert (actual - expected).abs().max() <= tolerance(expected)
    assert "torch_dtype" not in source.family.write_config(source.arch)


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("flint", {"mlp_only_layers": None}),
        ("hunyuan_v1_moe", {"num_experts_per_tok": 3, "num_local_experts": 5}),
        ("youtu", {"rope_interleave": None}),
        (
            "ministral3",
            {
                "rope_parameters": None,
                "rope_scaling": {
                    "rope_type": "yarn",
                    "rope_theta": 1e4,
                    "factor": 4.0,
                    "original_max_position_embeddings": 8,
                    "mscale": 1.0,
                    "mscale_all_dim": 1.0,
                    "llama_4_scaling_beta": 0.3,
                },
            },
        ),
    ],
)
def test_other_spellings_of_a_config_mean_what_they_mean_to_transformers(
    family: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    """The model is built by `transformers` from the config as it is stated."""
    of_family = CASES[family][1]
    plain = {**SMALL, **NEEDED.get(family, {}), **of_family}
    for name in ("num_experts", "moe_topk") if "num_local_experts" in changes else ():
        del plain[name]
    config = {**plain, **changes, "model_type": family}
    written = tmp_path / "config.json"
    written.write_text(json.dumps(config))
    stated = CONFIGS[family].from_pretrained(tmp_path)
    model = transformers.AutoModelForCausalLM.from_config(stated, attn_implementation="eager").eval()
    model.save_pretrained(tmp_path)
    written.write_text(json.dumps({**config, "dtype": "float32"}))
    with torch.no_grad():
        expected = model(tokens(1, SEQ_LEN)).logits
        actual = build_decoder(Checkpoint(tmp_path), dtype=torch.float32, device=CPU)(tokens(1, SEQ_LEN))
    assert (actual - expected).abs().max() <= tolerance(expected)


# The defaults of these families are those of a variant that is refused, or they have none.
STATED: dict[str, dict[str, Any]] = {
    "gemma3n_text": {"vocab_size_per_layer_input": 97, "num_kv_shared_layers": 0},
    "gemma4_text": {"hidden_size_per_layer_input": 0},
    "lfm2_moe": {"layer_types": ["conv", "full_attention", "conv"]},
    "nemotron_h": {"layers_block_type": ["mamba", "mlp", "attention"]},
    # heads of the default size do not span this hidden size
    "helium": {"head_dim": 4, "num_key_value_heads": 4},
    # these have no default
    "hunyuan_v1_dense": {"head_dim": 4},
    "hunyuan_v1_moe": {"head_dim": 4},
    "dots1": {"n_routed_experts": 8, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "deepseek_v2": {"num_experts_per_tok": 2},
    # their defaults are as many as the heads of one model
    "deepseek_v3": {"num_key_value_heads": 64},
    "deepseek_v32": {"num_key_value_heads": 64},
    "axk1": {"num_key_value_heads": 64},
    "axk2": {"num_key_value_heads": 64},
    "dots3_note_text": {"num_key_value_heads": 64, "swa_num_attention_heads": 64},
    "youtu": {"num_key_value_heads": 64},
    "minicpm3": {"num_key_value_heads": 64},
    "glm4_moe_lite": {"num_key_value_heads": 64},
    "kimi_linear": {"num_key_value_heads": 64},
    "bailing_hybrid": {"num_key_value_heads": 64, "layer_group_size": 3},
    "nemotron": {"num_key_value_heads": 64},  # its class computes nothing without
    # of heads as narrow as these, two dimensions rotate
    "gpt_neox": {"rotary_pct": 0.5},
    "stablelm": {"partial_rotary_factor": 0.5},
    # the width of the FFNs of one model
    "opt": {"ffn_dim": 80},
    "xglm": {"ffn_dim": 80},
    "gptj": {"rotary_dim": 4},
    "codegen": {"rotary_dim": 4},
    "gpt_neo": {"attention_types": [[["global", "local"], 1], [["global"], 1]]},
    "bitnet": {"num_key_value_heads": 64},
    # its class has no default
    "cohere_compass_text": {"rope_parameters": {"full_attention": {"rope_theta": 10000.0}}},
    "mamba2": {"num_heads": 8},  # those of the default are wider than this hidden size
}


@pytest.mark.parametrize("family", TEXT_FAMILIES)
@pytest.mark.one_in(12)
def test_fields_left_to_their_defaults_mean_what_they_mean_to_transformers(
    family: str, tmp_path: Path
) -> None:
    """A config that states shapes only, as hand-written and older ones do."""
    required = (
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "max_position_embeddings",
    )
    config: dict[str, Any] = {key: SMALL[key] for key in required}
    config.update(model_type=family, num_attention_heads=64, hidden_size=256, **STATED.get(family, {}))
    spelled = FAMILIES.get(family).spelled
    config = {spelled.get(name, name): value for name, value in config.items()}
    arch = family_of(config).read_config(config)
    (tmp_path / "config.json").write_text(json.dumps(config))
    stated = type(build(family, {}).config).from_pretrained(tmp_path)
    eps = getattr(stated, spelled.get("rms_norm_eps", "rms_norm_eps"), OWN_EPS.get(family))
    assert arch.norm_eps == (stated.layer_norm_eps if eps is None else eps)
    if family in FIXED_ACTIVATIONS:
        assert arch.activation == FIXED_ACTIVATIONS[family]
    else:
        activation = getattr(stated, spelled.get("hidden_act", "hidden_act"), "silu")
        assert arch.activation == SAME_ACTIVATIONS.get(activation, activation)
    assert arch.tied_head == getattr(stated, "tie_word_embeddings", False)
    if family in ATTENTION_FREE:
        for facts in (layer.recurrence for layer in arch.layers):
            assert facts is not None
            assert (facts.key_dim, facts.kernel_size) == (stated.state_size, stated.conv_kernel)
            of_factor = family == "mamba2"
            assert facts.value_size == (stated.expand * 256 if of_factor else stated.intermediate_size)
            assert getattr(facts, "rank", stated.time_step_rank) == stated.time_step_rank
            assert facts.num_key_heads == getattr(stated, "n_groups", 1)
        return
    for layer, theirs in zip(arch.layers, stated.per_layer_config, strict=True):
        assert layer.num_kv_heads == kv_heads_of(theirs, in_window=layer.window is not None) * (
            2 if family in TWICE_IN_WINDOWS and layer.window else 1
        )
        head_dim = getattr(theirs, "head_dim", None) or theirs.hidden_size // theirs.num_attention_heads
        of_latents = getattr(theirs, "qk_head_dim", None)
        if family == "dots3_note_text":
            of_latents = theirs.qk_nope_head_dim + theirs.qk_rope_head_dim
        assert layer.head_dim == (of_latents or head_dim)
    types = types_of(stated) or ["every layer"] * arch.num_layers
    has_window = family in ("mistral", "deepseek_v4") or {"sliding_attention", "hybrid_sliding"} & set(types)
    window = window_of(stated) if has_window else None
    for layer, kind in zip(arch.layers, types, strict=True):
        assert layer.window == (None if kind in ("full_attention", "indexed_attention", "hybrid") else window)
        if layer.rope is not None:
            if family == "deepseek_v4":
                kind = "main" if kind == "sliding_attention" else "compress"
            ropes = ropes_of(stated)
            rope = ropes.get(kind, ropes)
            assert (layer.rope.theta, layer.rope.kind) == (rope["rope_theta"], rope["rope_type"])
            assert (layer.rope.rotary_dim or head_dim) == int(head_dim * rope.get("partial_rotary_factor", 1))
    if arch.has_experts:
        experts = next(layer.experts for layer in arch.layers if layer.experts is not None)
        chosen = {"aria_text": "moe_topk", "dbrx": "moe_top_k"}.get(family, "num_experts_per_tok")
        stated = stated.ffn_config if family == "dbrx" else stated
        assert experts.top_k - experts.always == getattr(stated, chosen)
        names = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
        assert experts.num_chosen - experts.zero_experts in [getattr(stated, name, None) for name in names]


@pytest.mark.parametrize("family", sorted({*FAMILIES.names()} - BY_ANOTHER_NAME.keys()))
@pytest.mark.one_in(4)
def test_canonical_names_map_onto_those_on_disk_and_back(family: str, tmp_path: Path) -> None:
    """Where a tensor holds several parameters, its members are those that it is found by."""
    saved(tmp_path, *next(case for case in CASES.values() if case[0] == family))
    source = Checkpoint(tmp_path)
    outer, layers = parameter_names(source.arch)
    canonical = [*outer, *(f"layers.{idx}.{name}" for idx, layer in enumerate(layers) for name in layer)]
    members = {source.family.tensor(name): members_of(source.family, source.arch, name) for name in canonical}
    stored = {source.family.from_memory(name) for name in tensors_of(tmp_path)}
    on_disk = {source.family.whole_of(name) or name for name in stored}
    after = other_experts(source.family, source.arch)
    others = {name for name in on_disk if source.family.is_untouched(name, after)}
    in_both = {name for name in others if name.endswith(".mlp.moe_statics.e_score_correction_bias")}
    assert members.keys() == (on_disk - others) | in_both
    assert sorted(name for names in members.values() for name in names) == sorted(canonical)
