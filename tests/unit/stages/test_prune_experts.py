"""`prune: {experts: ...}`: which experts stay, and that what is left computes as those alone do."""

from pathlib import Path

import pytest
import torch

from compress.artifact.writer import ArtifactWriter
from compress.calibrate.expert_scores import best_experts, expert_scores
from compress.context import Context
from compress.data.model_tokens import TOKENS_NAME
from compress.data.tokens import TokenSet, save_token_set
from compress.errors import UsageError
from compress.models.checkpoint import Checkpoint
from compress.models.checkpoint_writer import write_checkpoint
from compress.models.decoder import Decoder
from compress.models.expert_pruning import ExpertSubset
from compress.models.pruning import StoredLayers
from compress.models.weights import build_decoder
from compress.registry.model_source import ModelSource
from compress.stages import STAGES, Input, Inputs, Port
from tests.support.tiny_decoder import tiny_arch, tiny_checkpoint, tiny_tokens
from tests.unit.calibrate.test_experts import MOE

CPU = torch.device("cpu")
GLM = {
    **{key: MOE[key] for key in ("vocab_size", "hidden_size", "num_attention_heads", "num_key_value_heads")},
    "model_type": "glm4_moe",
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "max_position_embeddings": 64,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "partial_rotary_factor": 0.5,
    "rms_norm_eps": 1e-5,
    "dtype": "float32",
}
GEMMA4 = {
    **{
        key: GLM[key]
        for key in GLM.keys() - {"n_routed_experts", "num_experts_per_tok", "partial_rotary_factor"}
    },
    "model_type": "gemma4_text",
    "enable_moe_block": True,
    "num_experts": 8,
    "top_k_experts": 2,
    "hidden_size_per_layer_input": 0,
    "head_dim": 8,
    "global_head_dim": 16,
    "num_global_key_value_heads": 1,
    "attention_k_eq_v": True,
    "tie_word_embeddings": False,
}
LATENTS = {
    **{key: value for key, value in GLM.items() if key not in ("partial_rotary_factor", "rms_norm_eps")},
    "model_type": "nemotron_h",
    "head_dim": 8,
    "mamba_num_heads": 4,
    "mamba_head_dim": 16,
    "ssm_state_size": 12,
    "n_groups": 1,
    "hybrid_override_pattern": "*EM",
    "num_hidden_layers": 3,
    "moe_shared_expert_intermediate_size": 40,
    "moe_latent_size": 16,
    "mlp_bias": True,
}
SOME_DENSE = MOE | {"mlp_only_layers": [1]}


def stage(tmp_path: Path, spec: dict[str, object], config: dict[str, object] = MOE) -> Path:
    arch = tiny_arch(config, dtype="float32")
    tiny_checkpoint(tmp_path / "model", arch)
    (tmp_path / "tokens").mkdir()
    save_token_set(TokenSet(tiny_tokens(arch, 6, 12), 0, 0, {}), tmp_path / "tokens" / TOKENS_NAME)
    for name in ("scratch", "out"):
        (tmp_path / name).mkdir()
    prune = STAGES.get("prune")
    inputs = Inputs(
        ModelSource(tmp_path / "model", "tiny", None, ""),
        {Port.DENSE: Input(tmp_path / "model", ""), Port.CALIB: Input(tmp_path / "tokens", "")},
    )
    out = ArtifactWriter(tmp_path / "out")
    prune.run(prune.spec.model_validate(spec), inputs, out, Context("cpu", 0, tmp_path / "scratch"))
    return tmp_path / "scratch" / "round-0"


@torch.no_grad()
def scores_by_hooks(decoder: Decoder, tokens: torch.Tensor) -> list[torch.Tensor]:
    """The definition, from hooks on the experts of a whole decoder."""
    found = []
    for layer in decoder.layers:
        if layer.shape.experts is None:
            found.append(torch.zeros(0))
            continue
        sums = torch.zeros(len(layer.moe.experts))
        counts = torch.zeros(len(layer.moe.experts))

        def look(moe: torch.nn.Module, args: tuple[torch.Tensor, ...], sums=sums, counts=counts) -> None:
            x_TD = args[0].flatten(0, 1)
            routing = moe.route(x_TD)
            for token, (chosen, weights) in enumerate(
                zip(routing.experts_TR, routing.weights_TR, strict=True)
            ):
                for expert, weight in zip(chosen.tolist(), weights.tolist(), strict=True):
                    ffn = moe.experts[expert]
                    if moe.facts.latent_size:
                        out_L = ffn.down(ffn.mid(moe.latent_in(x_TD[token])))
                        sums[expert] += weight * float((moe.latent_out.weight @ out_L).norm())
                    else:
                        sums[expert] += weight * float(ffn.down(ffn.mid(x_TD[token])).norm())
                    counts[expert] += 1

        layer.moe.register_forward_pre_hook(look)
        found.append((sums, counts))
    decoder(tokens)
    return [each if isinstance(each, torch.Tensor) else each[0] / each[1].clamp(min=1) for each in found]


@pytest.mark.parametrize("config", [MOE, LATENTS])
def test_scores_are_the_mean_weighted_norms_of_the_outputs(config: dict[str, object], tmp_path: Path) -> None:
    arch = tiny_arch(config, dtype="float32")
    source = Checkpoint(tiny_checkpoint(tmp_path / "model", arch))
    tokens = tiny_tokens(arch, 3, 10)
    ours = expert_scores(source, tokens, Context("cpu", 0, tmp_path), compute_dtype=torch.float32)
    expected = scores_by_hooks(build_decoder(source, dtype=torch.float32, device=CPU), tokens)
    for one, other in zip(ours, expected, strict=True):
        assert torch.allclose(one.float(), other, rtol=1e-4)


@pytest.mark.parametrize("config", [MOE, GLM, GEMMA4, SOME_DENSE, LATENTS])
def test_the_stage_leaves_a_model_of_the_best_experts(config: dict[str, object], tmp_path: Path) -> None:
    directory = stage(tmp_path, {"experts": {"keep": 0.75}}, config)
    source = Checkpoint(tmp_path / "model")
    tokens = tiny_tokens(source.arch, 6, 12)
    scores = expert_scores(source, tokens, Context("cpu", 0, tmp_path), compute_dtype=torch.float32)
    subset = ExpertSubset(source, [best_experts(each, 6) if len(each) else [] for each in scores])
    (tmp_path / "written").mkdir()
    write_checkpoint(tmp_path / "written", subset)
    reread = Checkpoint(tmp_path / "written")
    assert [each.widths for each in reread.arch.layers] == [each.widths for each in source.arch.layers]
    assert [each.experts.num_experts for each in reread.arch.layers if each.experts] == [
        6 for each in reread.arch.layers if each.experts
    ]
    with torch.no_grad():
        whole = build_decoder(source, dtype=torch.float32, device=CPU)
        for layer, kept in zip(whole.layers, subset._kept, strict=True):
            if layer.shape.experts is not None:
                gone = [idx for idx in range(8) if idx not in kept]
                mask = torch.zeros(8).index_fill(0, torch.tensor(gone), -1e9)
                forbid(layer.moe, mask)
        expected = whole(tokens[:2].long())
        actual = build_decoder(reread, dtype=torch.float32, device=CPU)(tokens[:2].long())
    assert torch.allclose(actual, expected, atol=1e-4)
    stored = StoredLayers(directory, reread.arch)
    for idx in range(reread.arch.num_layers):
        ours = stored.layer(idx)
        assert ours.keys() == subset.layer(idx).keys()
        assert all(torch.equal(ours[name], value) for name, value in subset.layer(idx).items())


def forbid(moe: torch.nn.Module, mask_E: torch.Tensor) -> None:
    """Let no token choose the masked experts."""
    from compress.models import moe as module

    def route(x_TD: torch.Tensor, *_: object) -> module.Routing:
        logits = moe._logits(x_TD) + mask_E
        bias = moe.selection_bias + mask_E if moe.facts.selection_bias else None
        scale = moe.output_scale if moe.facts.output_scale else None
        return module.route(moe.facts, logits, bias, scale)

    moe.route = route


def test_fewer_experts_than_a_token_goes_to_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="every token goes to 2"):
        stage(tmp_path, {"experts": {"keep": 1}})


def test_channels_of_experts_are_not_pruned(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="remove whole experts"):
        stage(tmp_path, {"ffn": {"keep": 0.5}})
