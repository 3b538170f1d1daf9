"""Caps of activations by layer (`LayerShape.ffn_cap`), as configs state them: a list with a number for each
layer, in which 0 and null are no cap. Lists may end with numbers of layers that predict further tokens."""

from dataclasses import replace

from compress.models.layer_shape import LayerShape
from compress.models.limits import CAPS
from compress.untrusted.fields import Fields


def with_caps(
    config: Fields, layers: tuple[LayerShape, ...], *, experts: str, shared: str, dense: str | None = None
) -> tuple[LayerShape, ...]:
    """Return the layers with the caps that a config states: the names are those of the lists for routed
    experts, for shared ones, and for FFNs of layers without experts, which may have none."""
    of_experts, of_shared, of_dense = (
        [None] * len(layers) if name is None else caps_of(config, name, len(layers))
        for name in (experts, shared, dense)
    )
    return tuple(
        replace(layer, ffn_cap=of_dense[idx])
        if layer.experts is None
        else replace(layer, ffn_cap=of_shared[idx], expert_cap=of_experts[idx])
        for idx, layer in enumerate(layers)
    )


def caps_of(config: Fields, name: str, num_layers: int) -> list[float | None]:
    """Return the cap of each layer that a list of a config states, None where there is none.

    Raises:
        UnsupportedArch: an entry is no cap, or the list has fewer than one for each layer.
    """
    stated = config.items(name, default=())
    if not stated:
        return [None] * num_layers
    if len(stated) < num_layers:
        raise config.wrong(name, stated, f"a list of {num_layers} caps, one for each layer")
    return [_cap(config, name, each) for each in stated[:num_layers]]


def caps_after(config: Fields, name: str, num_layers: int) -> float | None:
    """Return the cap that a list of a config states for each layer after the last of so many, None where it
    ends before.

    Raises:
        UnsupportedArch: an entry is no cap, or they differ.
    """
    stated = config.items(name, default=())[num_layers:]
    caps = [_cap(config, name, each) for each in stated]
    if any(each != caps[0] for each in caps):
        raise config.wrong(name, list(stated), "the same for all layers that predict further tokens")
    return caps[0] if caps else None


def _cap(config: Fields, name: str, stated: object) -> float | None:
    if stated is None or (type(stated) in (int, float) and stated == 0):
        return None
    low, high = CAPS
    if isinstance(stated, int | float) and type(stated) is not bool and low <= stated <= high:
        return float(stated)
    raise config.wrong(name, stated, f"a list of caps from {low:g} to {high:g}, with 0 or null for none")
