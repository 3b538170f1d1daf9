"""Tiny checkpoints of Gemma 4 with an assistant, and its proposals computed by `transformers`.

`transformers` 5.23.0 cannot build an assistant: `kv_sharing_modes` of its text config wants a layer with keys
of each type, and no layer of an assistant has keys. Its modules are built here with that property alone
replaced. Nor does it hand the keys and values of a target to an assistant where no later layer of the target
reads them; here the last layer of each type hands them on in any case.
"""

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import transformers
from torch import Tensor
from transformers.generation.candidate_generator import SinglePositionMultiTokenCandidateGenerator

from tests.support.tiny_hf import saved

VOCAB = 96
CLUSTERS = {"use_ordered_embeddings": True, "num_centroids": 12, "centroid_intermediate_top_k": 3}
ROPES = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
    "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.5, "rope_theta": 9000.0},
}
TARGET: dict[str, Any] = {
    "vocab_size": VOCAB,
    "vocab_size_per_layer_input": VOCAB,
    "hidden_size_per_layer_input": 16,
    "num_hidden_layers": 6,
    "num_kv_shared_layers": 3,
    "head_dim": 16,
    "global_head_dim": 32,
    "num_key_value_heads": 1,
    "sliding_window": 5,
    "max_position_embeddings": 192,
    "rope_parameters": ROPES,
    "layer_types": ["sliding_attention", "full_attention", *["sliding_attention"] * 3, "full_attention"],
}
OTHERS: dict[str, dict[str, Any]] = {
    "shared": {},
    "apart": {
        "num_kv_shared_layers": 0,
        "hidden_size_per_layer_input": 0,
        "num_key_value_heads": 2,
        "num_global_key_value_heads": 1,
        "attention_k_eq_v": True,
    },
    "experts": {
        "num_kv_shared_layers": 0,
        "hidden_size_per_layer_input": 0,
        "enable_moe_block": True,
        "num_experts": 6,
        "top_k_experts": 2,
        "moe_intermediate_size": 24,
    },
}
"""Targets: with layers that read keys and values of others, without, and with experts."""


_AS_TARGET = (
    *("vocab_size", "head_dim", "global_head_dim", "num_key_value_heads", "num_global_key_value_heads"),
    *("sliding_window", "rope_parameters", "attention_k_eq_v"),
)
"""Fields that an assistant has as its target."""


@dataclass(frozen=True)
class Pair:
    """A target and an assistant as modules of `transformers`, in the directories in which they are saved."""

    target: Any
    assistant: Any
    target_path: Path
    assistant_path: Path

    @torch.no_grad()
    def proposed(self, tokens: Sequence[int], k: int) -> "Proposed":
        """Return the greedy proposals that follow some tokens."""
        states: list[Tensor] = []
        hook = self.assistant.register_forward_hook(lambda *args: states.append(args[2].last_hidden_state))
        config = copy.deepcopy(self.assistant.generation_config)
        config.max_length = 10**6
        self.assistant.generation_config.num_assistant_tokens = k
        generator = SinglePositionMultiTokenCandidateGenerator(
            self.assistant, self.target.get_input_embeddings(), config
        )
        tokens_1S = torch.tensor([list(tokens)])
        outputs = self.target(
            tokens_1S[:, :-1], output_hidden_states=True, return_shared_kv_states=True, use_cache=False
        )
        candidates_1S, logits_1KV = generator.get_candidates(
            tokens_1S, {}, outputs, is_first_iteration=False, n_last_matches=0
        )
        hook.remove()
        assert logits_1KV is not None
        return Proposed(candidates_1S[0, len(tokens) :].tolist(), logits_1KV[0], torch.cat(states)[:, 0])


@dataclass(frozen=True)
class Proposed:
    """The tokens of k passes, their logits [K, V], and the hidden states [K, D] that the next pass reads."""

    tokens: list[int]
    logits_KV: Tensor
    hidden_KD: Tensor


def saved_pair(
    directory: Path,
    case: str = "shared",
    *,
    unified: bool = False,
    of_target: dict[str, Any] | None = None,
    text: dict[str, Any] | None = None,
    seed: int = 0,
    **changes: Any,
) -> Pair:
    """Save a target and an assistant of it below a directory. `changes` are fields of the assistant's config,
    `text` those of its text config, `of_target` those of the target."""
    stated = {**TARGET, **OTHERS[case], **(of_target or {})}
    paths = directory / "target", directory / "assistant"
    target = saved(paths[0], "gemma4_unified" if unified else "gemma4_text", stated, seed=seed)
    _hand_on_keys(target)
    hidden_size = target.config.get_text_config().hidden_size
    assistant = build_assistant(stated, hidden_size, unified=unified, text=text, seed=seed + 7, **changes)
    assistant.save_pretrained(paths[1])
    return Pair(target, assistant, *paths)


def build_assistant(
    stated: dict[str, Any],
    target_size: int,
    *,
    unified: bool = False,
    text: dict[str, Any] | None = None,
    seed: int = 7,
    **changes: Any,
) -> Any:
    """Return an assistant with random weights for a target of this hidden size, whose config has the fields
    `stated`."""
    own = {
        **{name: copy.deepcopy(stated[name]) for name in _AS_TARGET if name in stated},
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_attention_heads": 4,
        "num_hidden_layers": 3,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
        "max_position_embeddings": 192,
        "num_kv_shared_layers": 3,
        "hidden_size_per_layer_input": 0,
        "vocab_size_per_layer_input": 0,
        **(text or {}),
    }
    kind = "Gemma4Unified" if unified else "Gemma4"
    if unified:
        own = {name: each for name, each in own.items() if not name.endswith("_per_layer_input")}
    config = getattr(transformers, f"{kind}AssistantConfig")(
        text_config=getattr(transformers, f"{kind}TextConfig")(**own),
        **{"backbone_hidden_size": target_size, **changes},
    )
    torch.manual_seed(seed)
    modes = property(lambda each: ["reuse"] * each.num_hidden_layers)
    with mock.patch.object(getattr(transformers, f"{kind}TextConfig"), "kv_sharing_modes", modes):
        model = getattr(transformers, f"{kind}AssistantForCausalLM")._from_config(
            config, attn_implementation="eager"
        )
    generator = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() > 1:
                parameter.copy_(noise * parameter.shape[-1] ** -0.5)
                continue
            parameter.copy_(parameter + 0.3 * noise)
            if name.endswith("q_norm.weight"):
                parameter.mul_(parameter.numel() ** -0.5)
        for name, buffer in model.named_buffers():
            if name.endswith("layer_scalar"):
                buffer.copy_(0.5 + torch.rand(buffer.shape, generator=generator))
            elif name.endswith("token_ordering"):
                buffer.copy_(torch.randperm(len(buffer), generator=generator))
    return model.eval()


def _hand_on_keys(target: Any) -> None:
    """Make the last layer of each type that has keys and values hand them to an assistant."""
    layers = target.get_decoder().layers if hasattr(target, "get_decoder") else target.model.layers
    last = {
        each.self_attn.layer_type: each.self_attn for each in layers if not each.self_attn.is_kv_shared_layer
    }
    for each in last.values():
        each.store_full_length_kv = True
