"""How checkpoints name the layer that predicts a further token (multi-token prediction, arXiv 2412.19437)."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class MtpNames:
    """Modules of an MTP head (`mtp.py`) on disk. `{layer}` is the name of its layer, which has index 0 after
    `layer_prefix`; where that is None, it is the layer after the model's last."""

    modules: Mapping[str, str]
    layer_prefix: str | None = None


AFTER_LAST = MtpNames(
    {
        "embed_norm": "{layer}.enorm",
        "hidden_norm": "{layer}.hnorm",
        "fc": "{layer}.eh_proj",
        "norm": "{layer}.shared_head.norm",
    }
)
IN_MTP = MtpNames(
    {
        "embed_norm": "mtp.pre_fc_norm_embedding",
        "hidden_norm": "mtp.pre_fc_norm_hidden",
        "fc": "mtp.fc",
        "norm": "mtp.norm",
    },
    "mtp.layers.",
)
