"""The shape of the layers that predict further tokens, where configs state their types (`mtp_layer_types`,
`mtp_mlp_layer_types`) as they state those of the layers."""

from collections.abc import Sequence

from compress.models.arch import Arch
from compress.models.layer_shape import LayerShape
from compress.models.layer_types import FULL, SLIDING
from compress.models.mixture import DENSE_LAYER, SPARSE_LAYER
from compress.models.mtp_names import last_layer_of, with_dense_ffn
from compress.untrusted.fields import Fields

_TYPES = "mtp_layer_types"
_FFN_TYPES = "mtp_mlp_layer_types"


def shape_by_types(target: Arch, config: Fields, types: Sequence[str], ffns: Sequence[str]) -> LayerShape:
    """Return the shape of the layers that predict further tokens of a model, of the types that a config
    states; where it states none, of these types of attention and of FFNs.

    Raises:
        UsageError: no layer of the model has their type of attention.
        UnsupportedArch: they have several types, or one that is not read.
    """
    kind = _only(config, _TYPES, types, (FULL, SLIDING))
    ffn = _only(config, _FFN_TYPES, ffns, (DENSE_LAYER, SPARSE_LAYER))
    layer = last_layer_of(target, windowed=kind == SLIDING, sparse=ffn == SPARSE_LAYER)
    return with_dense_ffn(target, layer) if ffn == DENSE_LAYER else layer


def _only(config: Fields, name: str, default: Sequence[str], known: tuple[str, ...]) -> str:
    stated = config.texts(name, default=default)
    if len({*stated}) != 1 or stated[0] not in known:
        raise config.wrong(name, ", ".join(stated), f"one type for all of them, {' or '.join(known)}")
    return stated[0]
