"""Facts of the fields of `config.json`: their defaults in `transformers`, and which of them it reads.

`models/` imports no `transformers`, so the facts ship as data. `python -m scripts.config_defaults` takes them
from the pinned version and writes `config_defaults.json`: the value that a field has where a config leaves it
out, and the names that the configuration class or the modeling code of a `model_type` reads. A field that
nobody reads, or that has the default, changes nothing.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from compress.untrusted.fields import Fields

FACTS_FILE = Path(__file__).parent / "config_defaults.json"
OF_OTHERS = {
    "kimi_k2": "deepseek_v3",
    "minimax_m1": "minimax",
    "minimax_text_01": "minimax",
    "phi4mm": "phi4_multimodal",
}
"""Names of models that `transformers` has under another name, and that name."""
NEVER_UNREAD = frozenset({"quantization_config", "original_max_position_embeddings", "auto_map"})
"""Fields that change the function although no modeling file reads them: loaders do. `auto_map` names code
of the checkpoint's own, which computes what its author meant and never runs here."""

IDLE_FIELDS = frozenset(
    [
        "architectures",
        "model_type",
        "dtype",
        "torch_dtype",
        "transformers_version",
        "_name_or_path",
        "name_or_path",
        "_commit_hash",
        "use_cache",
        "initializer_range",
        "attention_dropout",
        "gradient_checkpointing",
        "bos_token_id",
        "eos_token_id",
        "pad_token_id",
        "sep_token_id",
        "output_attentions",
        "output_hidden_states",
        "return_dict",
        "num_labels",
        "id2label",
        "label2id",
        "problem_type",
        "classifier_dropout",
        "hidden_dropout",
        "z_loss_coefficient",
        "rescale_prenorm_residual",
        "time_step_max",
        "time_step_floor",
        "num_logits_to_keep",
        "use_mamba_kernels",
        "use_mambapy",
        "use_associative_scan",
        "quantization_config",
        "attn_implementation",
        "_attn_implementation",
        "_attn_implementation_internal",
        "experts_implementation",
        "_experts_implementation",
    ]
)
"""Fields that programs read, but not for what a causal language model computes: for training and the values
that it begins with, token ids, classifiers, the form of the output, the kernels of `transformers`, and the
codes of the weights, which `checkpoint.py` decodes."""
TRAINING_OF_ROUTERS = frozenset(["output_router_logits", "router_aux_loss_coef", "router_jitter_noise"])
"""Fields of mixtures of experts that only training reads."""
HONOURED_FIELDS: Mapping[str, Any] = {"rope_interleaved": False, "is_causal": True}
"""Fields that no configuration class declares, and the one value of each that the decoder computes in every
family: it rotates the halves of a head and not neighbours, and no position sees a later one."""
SHAPE_FIELDS = frozenset(
    [
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "hidden_act",
        "rms_norm_eps",
        "max_position_embeddings",
        "tie_word_embeddings",
        "rope_theta",
        "rope_scaling",
        "rope_parameters",
        "original_max_position_embeddings",
    ]
)
"""Fields that every family reads."""


@dataclass(frozen=True)
class ConfigFacts:
    """The facts of one `model_type`; `reads` is None where nobody recorded which names are read."""

    defaults: Mapping[str, Any]
    reads: frozenset[str] | None

    def is_inert(self, name: str, value: Any) -> bool:
        """Return whether a field of that value computes what a config without it computes."""
        if name in self.defaults and is_same(value, self.defaults[name]):
            return True
        return self.is_unread(name)

    def is_unread(self, name: str) -> bool:
        """Return whether nobody reads a field, whatever its value."""
        if self.reads is None or name.startswith("rope_") or name in NEVER_UNREAD:
            return False
        return name not in self.reads


def facts_of(model_type: str) -> ConfigFacts:
    """Return the facts of a `model_type`; of one that was not recorded, the defaults of every model."""
    stored = _stored()
    model_type = OF_OTHERS.get(model_type, model_type)
    if model_type not in stored["models"]:
        return ConfigFacts(stored["every_model"]["defaults"], None)
    facts = stored["models"][model_type]
    return ConfigFacts(facts["defaults"], frozenset(facts["reads"]))


def is_same(one: Any, other: Any) -> bool:
    """Return whether two values of JSON are equal and of one type: `true` is not 1, nor is 1.0."""
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(is_same(one[key], other[key]) for key in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(is_same, one, other))
    return bool(one == other)


def only_own_code(config: Fields, classes: Sequence[str]) -> None:
    """Refuse an `auto_map` to other classes than those that `transformers` took over from the model."""
    for name in config.mapping("auto_map", default={}).values():
        if str(name).rpartition(".")[2] not in classes:
            raise config.wrong("auto_map", name, f"one of {', '.join(classes)}")


def implies_own_code(*classes: str) -> Callable[[Fields], dict[str, Any]]:
    """Return what a config of a family implies: nothing, and no `auto_map` to classes other than these."""

    def implied(config: Fields) -> dict[str, Any]:
        only_own_code(config, classes)
        return {}

    return implied


@cache
def _stored() -> Any:
    return json.loads(FACTS_FILE.read_text(encoding="utf-8"))
