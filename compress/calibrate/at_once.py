"""A layer whose linear groups are all compressed from one observation of it, and assigned to ranks by their
cost."""

from collections.abc import Callable, Sequence

from compress.calibrate.layer_state import LayerPass, LayerState, needed_stats
from compress.calibrate.observe import gather_layer, observe
from compress.models.arch import Arch
from compress.models.linear_groups import LinearGroup


def compress_at_once(
    state: LayerState,
    arch: Arch,
    passes: Sequence[LayerPass],
    *,
    prefetch_next: Callable[[], None],
    on_kv_ready: Callable[[], None],
) -> None:
    """Compress a layer of `arch`. Afterwards the state holds the results of all ranks, and the samples are
    still the layer's inputs.

    Args:
        prefetch_next: called once the observed layer is freed, so that there is memory for the next one.
        on_kv_ready: called when the linears of keys and values have their final weights.
    """
    run = state.run
    layer = run.build_layer(arch, state.layer_idx, state.loaded_weights())
    kinds = needed_stats(passes)
    if layer.shape.experts is not None:
        layer.moe.taps_see_all = run.experts.starved == "all_tokens"
    trees = observe(
        layer,
        run,
        kinds,
        source_layer=layer,
        token_weights=state.guide.token_weights,
        source_experts=layer,
    )
    groups = layer.groups()
    owners = assign_groups(arch, state.layer_idx, groups, run.ranks.size)
    state.stats, state.tokens = gather_layer(trees, layer, kinds, owners, run)
    state.groups = [group for group in groups if owners[group.tap] == run.ranks.rank]
    del layer, trees
    prefetch_next()
    for each in passes:
        each.apply(state)
    for results in run.ranks.all_gather(state.results_for(list(state.num_rows))):
        state.merge_results(results)
    on_kv_ready()


def assign_groups(
    arch: Arch, layer_idx: int, groups: Sequence[LinearGroup], num_ranks: int
) -> dict[str, int]:
    """Return tap -> the rank that compresses its linear group: the costliest group first, each to the rank
    with the least to do."""
    layer = arch.layers[layer_idx]
    shapes = {
        group.tap: [layer.linear_shape(name, arch.hidden_size) for name in group.linears] for group in groups
    }
    costs = {
        tap: sum(rows for rows, _ in each) * each[0][1] ** 2 + each[0][1] ** 3 for tap, each in shapes.items()
    }
    load = [0] * num_ranks
    owners = dict[str, int]()
    for tap in sorted(costs, key=lambda tap: -costs[tap]):
        owners[tap] = load.index(min(load))
        load[owners[tap]] += costs[tap]
    return owners
