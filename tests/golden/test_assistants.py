"""Assistants of Gemma 4 against `transformers`: what is read, and what is proposed in an engine."""

import copy
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from compress.errors import CompressError, UnsupportedArch, UnsupportedFormat, UsageError
from compress.export import open_checkpoint, open_weights
from compress.export.draft import kind_of_draft, open_assistant, open_draft
from compress.models.arch import Arch
from compress.models.assistant import (
    KIND,
    AssistantFacts,
    OrderedEmbeddings,
    clusters,
    target_layers,
)
from compress.models.assistant_reader import assistant_facts, is_assistant, read_assistant
from compress.models.family import family_of
from compress.runtime.engine import Engine
from compress.runtime.engine_config import EngineConfig
from compress.runtime.ordered_logits import ordered_logits
from compress.runtime.request import Request, SamplingParams
from compress.runtime.speculative.assistant import AssistantModel, AssistantProposer
from compress.runtime.speculative.speculation import Speculative
from tests.support.tiny_assistant import CLUSTERS, TARGET, VOCAB, Pair, saved_pair

CPU = torch.device("cpu")
CASES = {
    "shared": {},
    "shared-ordered": CLUSTERS,
    "apart": {},
    "apart-unified": {"unified": True},
    "apart-unified-ordered": {"unified": True, **CLUSTERS},
    "experts-ordered": CLUSTERS,
    "shared-own-head": {"tie_word_embeddings": False},
    "shared-one-layer": {"text": {"num_hidden_layers": 1, "layer_types": ["full_attention"]}},
    "apart-capped": {"text": {"final_logit_softcapping": 3.0, "attention_bias": True}},
}
"""Cases of targets, and what their assistants have: `transformers` caps no logits of an assistant, whatever
its text config states."""
K = 4


def pair_of(path: Path, case: str) -> Pair:
    own = dict(CASES[case])
    text = own.pop("text", {})
    if text.get("num_hidden_layers"):
        text = {**text, "num_kv_shared_layers": text["num_hidden_layers"]}
    return saved_pair(path, case.partition("-")[0], text=text, **own)


def tolerance(reference: Tensor, num_passes: int) -> float:
    """Every layer of the target and of each pass adds roundings of dot products over at most 96 features and
    of the softmax; their order differs between the two sides."""
    roundings = 8 * (TARGET["num_hidden_layers"] + 3 * num_passes) + 2
    return roundings * torch.finfo(torch.float32).eps * 96**0.5 * float(reference.abs().max())


def requests(num: int, *, max_tokens: int = 10) -> list[Request]:
    params = SamplingParams(max_tokens, temperature=0.0, ignore_eos=True)
    prompts = [((torch.arange(3 + 5 * idx) * 7 + idx) % (VOCAB - 1) + 1).tolist() for idx in range(num)]
    return [Request(str(idx), tuple(each), params) for idx, each in enumerate(prompts)]


def engine_of(pair: Pair, rate: float | None, **options: Any) -> Engine:
    assistant = AssistantModel(read_assistant(pair.assistant_path))
    speculative = Speculative(assistant, k=K, forced_rate=rate)
    config = EngineConfig(max_batch_size=4, max_model_len=128, speculative=speculative, **options)
    return Engine(open_checkpoint(pair.target_path), device=CPU, config=config)


@pytest.mark.parametrize(
    ("case", "rate"), [*((case, None) for case in CASES), ("shared", 0.7), ("apart", 1.0)]
)
@pytest.mark.one_in(3)
def test_proposals_are_the_candidates_of_transformers(case: str, rate: float | None, tmp_path: Path) -> None:
    """Tokens, logits and hidden states of every pass, in batches, with chunks of prompts, for sequences
    longer than the window, and after proposals were rejected or kept."""
    pair = pair_of(tmp_path, case)
    engine = engine_of(pair, rate, max_step_tokens=19)
    assert engine._speculation is not None
    proposer = engine._speculation._proposer
    assert isinstance(proposer, AssistantProposer)
    passes: list[tuple[Tensor, Tensor]] = []
    run_pass, propose = proposer._pass, proposer.propose
    num_checked = 0

    def kept(*operands: Tensor) -> tuple[Tensor, Tensor]:
        logits_RV, hidden_RD = run_pass(*operands)
        passes.append((logits_RV.clone(), hidden_RD.clone()))
        return logits_RV, hidden_RD

    def checked(rows: Any, state: Any) -> Any:
        nonlocal num_checked
        passes.clear()
        drafts = propose(rows, state)
        for row_idx, row in enumerate(rows):
            expected = pair.proposed(row.tokens, K)
            num_checked += 1
            assert drafts.tokens_RK[row_idx].tolist() == expected.tokens
            for step, (logits_RV, hidden_RD) in enumerate(passes):
                wanted_V, wanted_D = expected.logits_KV[step], expected.hidden_KD[step]
                own_V = logits_RV[row_idx]
                has_logit = own_V.isfinite()
                num_logits = 24 if "ordered" in case else VOCAB
                assert int(has_logit.sum()) == num_logits
                assert bool((wanted_V[~has_logit] < wanted_V[has_logit].min()).all())
                difference = (own_V - wanted_V)[has_logit].abs().max()
                assert float(difference) <= tolerance(wanted_V, step + 1)
                assert float((hidden_RD[row_idx] - wanted_D).abs().max()) <= tolerance(wanted_D, step + 1)
        return drafts

    proposer._pass = kept  # type: ignore[method-assign]
    proposer.propose = checked  # type: ignore[method-assign]
    engine.generate(requests(6))
    assert num_checked > (40 if rate is None else 10)


def test_ordered_logits_are_those_of_the_chosen_clusters() -> None:
    generator = torch.Generator().manual_seed(0)
    hidden_RD, head_VD, centroids_CD = (
        torch.randn(shape, generator=generator) for shape in ((5, 16), (24, 16), (6, 16))
    )
    ordered = OrderedEmbeddings(num_centroids=6, top_k=2)
    tokens_CN = clusters(torch.randperm(24, generator=generator), ordered)
    scores_RC = hidden_RD @ centroids_CD.T
    found_RV = ordered_logits(hidden_RD, scores_RC, head_VD, tokens_CN, ordered.top_k)
    all_RV = hidden_RD @ head_VD.T
    for row_idx, scores_C in enumerate(scores_RC.tolist()):
        best = sorted(range(6), key=lambda idx, scores=scores_C: scores[idx])[-2:]  # type: ignore[misc]
        words = {int(token) for idx in best for token in tokens_CN[idx]}
        for token in range(24):
            wanted = float(all_RV[row_idx, token]) if token in words else float("-inf")
            assert float(found_RV[row_idx, token]) == pytest.approx(wanted, abs=1e-5)


def test_a_directory_with_an_assistant_is_known_and_opened(tmp_path: Path) -> None:
    pair = pair_of(tmp_path, "shared")
    assert is_assistant(pair.assistant_path)
    assert not is_assistant(pair.target_path)
    assert not is_assistant(tmp_path / "nothing")
    assert kind_of_draft(pair.assistant_path) == KIND
    assert isinstance(open_draft(pair.assistant_path), AssistantModel)
    with pytest.raises(UsageError, match="holds no assistant: the model_type"):
        open_assistant(pair.target_path)
    with pytest.raises(UnsupportedArch, match=r"'gemma4_assistant'.*is not supported"):
        open_weights(pair.assistant_path)  # it is no model of its own


def test_keys_of_its_own_that_a_program_stored_are_passed_over(tmp_path: Path) -> None:
    path = pair_of(tmp_path, "shared").assistant_path
    before = read_assistant(path)
    with_tensors(path, {"model.layers.0.self_attn.k_proj.weight": torch.ones(16, 32)})
    after = read_assistant(path)
    assert before.weights.keys() == after.weights.keys()


@pytest.mark.parametrize(
    ("changes", "text", "message"),
    [
        ({"model_type": "gemma5_assistant"}, {}, "model_type = 'gemma5_assistant'"),
        ({"backbone_hidden_size": None}, {}, "backbone_hidden_size"),
        ({"use_ordered_embeddings": True, "num_centroids": 7}, {}, "7 centroids of 96 tokens"),
        (
            {"use_ordered_embeddings": True, "num_centroids": 4, "centroid_intermediate_top_k": 5},
            {},
            "of which 5 are chosen",
        ),
        ({}, {"num_kv_shared_layers": 2}, "num_kv_shared_layers = 2.*3: all layers read"),
        ({}, {"hidden_size_per_layer_input": 16}, "hidden_size_per_layer_input = 16"),
        ({}, {"hidden_size_per_layer_input": None}, "hidden_size_per_layer_input = 256"),
        ({}, {"enable_moe_block": True}, "enable_moe_block = True"),
        ({}, {"use_double_wide_mlp": True}, "use_double_wide_mlp = True"),
        ({}, {"model_type": "gemma3_text"}, "model_type = 'gemma3_text'"),
        ({}, {"use_bidirectional_attention": "all"}, "use_bidirectional_attention = 'all'"),
    ],
)
def test_configs_of_other_assistants_are_refused(
    changes: dict[str, Any], text: dict[str, Any], message: str, tmp_path: Path
) -> None:
    path = pair_of(tmp_path, "shared").assistant_path
    restate(path, changes, text)
    with pytest.raises(CompressError, match=message):
        read_assistant(path)


def test_quantized_assistants_are_refused(tmp_path: Path) -> None:
    path = pair_of(tmp_path, "shared").assistant_path
    restate(path, {"quantization_config": {"quant_method": "gptq", "bits": 4}}, {})
    with pytest.raises(UnsupportedFormat, match="quant_method 'gptq', and assistants are read dense"):
        read_assistant(path)


@pytest.mark.parametrize(
    ("case", "name", "tensor", "message"),
    [
        ("shared", "pre_projection.weight", None, "lacks pre_projection.weight"),
        ("shared", "post_projection.weight", torch.ones(5, 32), r"post_projection.weight' is \[5, 32\]"),
        ("shared", "model.layers.9.mlp.up_proj.weight", torch.ones(2, 2), "holds the tensor 'model.layers.9"),
        (
            "shared",
            "model.norm.weight",
            torch.ones(32, dtype=torch.int8),
            "int8, and assistants are read dense",
        ),
        ("shared", "lm_head.weight", torch.ones(VOCAB, 32), "ties the head to the embedding"),
        ("shared-ordered", "masked_embedding.token_ordering", None, "lacks masked_embedding.token_ordering"),
        (
            "shared-ordered",
            "masked_embedding.token_ordering",
            torch.zeros(VOCAB, dtype=torch.int64),
            "must have each of them once",
        ),
        (
            "shared-ordered",
            "masked_embedding.token_ordering",
            torch.arange(VOCAB - 1),
            "it must have 96 whole numbers",
        ),
    ],
)
def test_tensors_that_are_missing_or_others_are_named(
    case: str, name: str, tensor: Tensor | None, message: str, tmp_path: Path
) -> None:
    path = pair_of(tmp_path, case).assistant_path
    with_tensors(path, {name: tensor})
    with pytest.raises(CompressError, match=message):
        read_assistant(path)


def test_the_order_of_tokens_may_be_stored_by_cluster(tmp_path: Path) -> None:
    path = pair_of(tmp_path, "shared-ordered").assistant_path
    before = read_assistant(path).tokens_CN
    assert before is not None
    name = "masked_embedding.token_ordering"
    with_tensors(path, {name: load_file(path / "model.safetensors")[name].view(12, 8)})
    after = read_assistant(path).tokens_CN
    assert after is not None
    assert torch.equal(before, after)


E2B: dict[str, Any] = {
    "architectures": ["Gemma4AssistantForCausalLM"],
    "audio_token_id": 258881,
    "backbone_hidden_size": 1536,
    "boa_token_id": 256000,
    "boi_token_id": 255999,
    "centroid_intermediate_top_k": 32,
    "dtype": "bfloat16",
    "eoa_token_id": 258883,
    "eoi_token_id": 258882,
    "image_token_id": 258880,
    "model_type": "gemma4_assistant",
    "num_centroids": 2048,
    "text_config": {
        "_name_or_path": "",
        "architectures": None,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "attention_k_eq_v": False,
        "bos_token_id": 2,
        "chunk_size_feed_forward": 0,
        "dtype": "bfloat16",
        "enable_moe_block": False,
        "eos_token_id": 1,
        "final_logit_softcapping": None,
        "global_head_dim": 512,
        "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh",
        "hidden_size": 256,
        "hidden_size_per_layer_input": 0,
        "id2label": {"0": "LABEL_0", "1": "LABEL_1"},
        "initializer_range": 0.02,
        "intermediate_size": 2048,
        "is_encoder_decoder": False,
        "label2id": {"LABEL_0": 0, "LABEL_1": 1},
        "layer_types": ["sliding_attention", "sliding_attention", "sliding_attention", "full_attention"],
        "max_position_embeddings": 131072,
        "model_type": "gemma4_text",
        "moe_intermediate_size": None,
        "num_attention_heads": 4,
        "num_experts": None,
        "num_global_key_value_heads": None,
        "num_hidden_layers": 4,
        "num_key_value_heads": 1,
        "num_kv_shared_layers": 4,
        "output_attentions": False,
        "output_hidden_states": False,
        "pad_token_id": 0,
        "problem_type": None,
        "return_dict": True,
        "rms_norm_eps": 1e-06,
        "rope_parameters": {
            "full_attention": {
                "partial_rotary_factor": 0.25,
                "rope_theta": 1000000.0,
                "rope_type": "proportional",
            },
            "sliding_attention": {"rope_theta": 10000.0, "rope_type": "default"},
        },
        "sliding_window": 512,
        "tie_word_embeddings": True,
        "top_k_experts": None,
        "use_bidirectional_attention": None,
        "use_cache": True,
        "use_double_wide_mlp": False,
        "vocab_size": 262144,
        "vocab_size_per_layer_input": 0,
    },
    "tie_word_embeddings": True,
    "transformers_version": "5.7.0.dev0",
    "use_ordered_embeddings": True,
}
"""config.json of google/gemma-4-E2B-it-assistant."""
_WIDE = {
    "hidden_size": 1024,
    "intermediate_size": 8192,
    "attention_k_eq_v": True,
    "sliding_window": 1024,
    "max_position_embeddings": 262144,
}
PUBLISHED: dict[str, tuple[int, dict[str, Any], tuple[int, ...], float]] = {
    "E2B": (1536, {}, (13, 14), 78e6),
    "E4B": (2560, {"num_key_value_heads": 2}, (22, 23), 78.8e6),
    "26B-A4B": (
        2816,
        {**_WIDE, "num_attention_heads": 16, "num_key_value_heads": 8, "num_global_key_value_heads": 2},
        (28, 29),
        0.4e9,
    ),
    "31B": (
        5376,
        {**_WIDE, "num_attention_heads": 32, "num_key_value_heads": 16, "num_global_key_value_heads": 4},
        (58, 59),
        0.5e9,
    ),
}
"""The hidden size of the target, fields of the text config other than those of E2B, the target's layers that
are read, and the parameters, as published (google/gemma-4-31B-it-assistant and others). The fields of the
last three were not seen as files."""


def published(name: str) -> AssistantFacts:
    size, text, _, _ = PUBLISHED[name]
    ordered = name.startswith("E")
    config = {**copy.deepcopy(E2B), "backbone_hidden_size": size, "use_ordered_embeddings": ordered}
    config["text_config"].update(text)
    return assistant_facts(config)


def target_of(name: str) -> Arch:
    configs = json.loads((Path(__file__).parent / "configs" / "wrappers.json").read_text())
    config = next(each["config"] for each in configs if each["name"] == f"google/gemma-4-{name}-it")
    return family_of(config).read_config(config)


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_assistants_fit_their_models_and_no_others(name: str) -> None:
    facts = published(name)
    size, _, read, num_params = PUBLISHED[name]
    assert facts.target_size == size
    assert (facts.ordered is not None) == name.startswith("E")
    assert sorted(target_layers(facts, target_of(name))) == list(read)
    assert facts.num_params == pytest.approx(num_params, rel=0.1)
    for other in PUBLISHED:
        if other != name:
            with pytest.raises(UsageError, match=f"hidden size {size}; this one has"):
                target_layers(facts, target_of(other))


def test_other_targets_are_refused_by_what_differs() -> None:
    facts = published("26B-A4B")
    target = target_of("26B-A4B")
    full = [layer for layer in target.layers if layer.window is None]
    for other, message in (
        (target.replace(vocab_size=9), "made for a model of 262144 tokens.*this one has 9 tokens"),
        (target.replace(layers=tuple(full)), "a layer with a window, and no layer of this gemma4 model has"),
        (target.replace(logit_scale=0.5), "the residual of this gemma4 model is several streams, or scaled"),
        (published_with_rope(target, 5000.0), "made for rope Rope.*Take the assistant of this model"),
    ):
        with pytest.raises(UsageError, match=message):
            target_layers(facts, other)
    wide = published("31B")
    with pytest.raises(UsageError, match="made for KV heads 4 in layers with full attention; layer 29"):
        target_layers(wide, target.replace(hidden_size=5376))


def published_with_rope(target: Arch, theta: float) -> Arch:
    return target.replace(
        layers=tuple(
            replace(layer, rope=None if layer.rope is None else replace(layer.rope, theta=theta))
            for layer in target.layers
        )
    )


def restate(path: Path, changes: dict[str, Any], text: dict[str, Any]) -> None:
    """Change fields of a config and of its text config; None takes one out."""
    config = json.loads((path / "config.json").read_text())
    for each, own in ((config, changes), (config["text_config"], text)):
        each.update(own)
        for name in [name for name, value in own.items() if value is None]:
            del each[name]
    (path / "config.json").write_text(json.dumps(config))


def with_tensors(path: Path, changes: dict[str, Tensor | None]) -> None:
    """Change tensors of a checkpoint; None takes one out."""
    tensors = load_file(path / "model.safetensors")
    for name, tensor in changes.items():
        if tensor is None:
            del tensors[name]
        else:
            tensors[name] = tensor
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
