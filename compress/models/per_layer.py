"""Widths that single layers have for themselves, in configs of `transformers`: a mapping from the index of a
layer to the fields that differ there."""

from collections.abc import Mapping

from compress.models.config_writer import PER_LAYER
from compress.untrusted.fields import Fields


def keys_of_layers(config: Fields) -> dict[int, str]:
    """Return the key that `PER_LAYER` has for each layer, which may begin with zeros.

    Raises:
        UnsupportedArch: a key is no number of a layer, or two are the same one.
    """
    keys: dict[int, str] = {}
    for key in config.fields(PER_LAYER):
        if not (key.isascii() and key.isdecimal() and len(key) <= 4) or int(key) in keys:
            raise config.wrong(PER_LAYER, key, "a mapping with one key for each layer, its number")
        keys[int(key)] = key
    return keys


def by_layer(widths: Mapping[int, Mapping[str, int]]) -> dict[str, dict[str, int]]:
    """Return the mapping of the widths of some layers, by keys of one length, as `transformers` writes
    them."""
    num_digits = len(str(max(widths, default=0)))
    return {str(idx).zfill(num_digits): dict(own) for idx, own in widths.items()}
