"""The estimate of quantizing for `compress plan`, from shapes alone: peak bytes, bytes on disk, operations
and launches."""

from dataclasses import replace

from compress.calibrate.estimate import (
    STACK_COPIES,
    Workload,
    flops,
    guide_effort,
    host_bytes,
    num_columns,
    peak_bytes,
)
from compress.calibrate.experts import ExpertPolicy
from compress.methods.quantize.awq import Awq
from compress.methods.quantize.descent import NUM_ROW_SETS, Descent
from compress.methods.quantize.gptq import Gptq
from compress.models.arch import Arch
from compress.models.arch_params import is_compressed, itemsize_of
from compress.quant.model_scheme import ModelScheme
from compress.quant.numerics import GRID_SIZE
from compress.quant.scheme import DENSE
from compress.runtime.kv_cache import kv_bytes_per_token, slot_bytes
from compress.stages import Estimate, PlanFacts
from compress.stages.budget.spec import Mixed, scheme_or_dense
from compress.stages.calibrate import calibration_of
from compress.stages.quantize.schemes import (
    check_model,
    linear_bytes,
    most_linear_bytes,
    outer_bytes,
    possible_schemes,
)
from compress.stages.quantize.spec import Quantize
from compress.stages.quantize.tune import RECOMPUTED_TOKENS, Tune, check_num_samples

COLUMNS_PER_LAUNCH = 128
"""Columns that one launch rounds, or descends, on a GPU (`kernels/columns`)."""
LOSS_COST = {"cpu": 1.0, "cuda": 1.5}
"""Cost of a product of a weight with its statistic that decides or reports, in products at the assumed rate;
on a GPU it is three products in bf16 with what surrounds them."""
ROUNDING_LIBRARY_BYTES = 20_000_000
"""Bytes that libraries and threads take on a CPU when they first round; nothing loads those of products."""
EXACT_COST = {"cpu": 1.0, "cuda": 5.0}
"""Cost of such a product in float32: 51 against 250 TFLOP/s on an H200."""


def estimate(spec: Quantize, facts: PlanFacts) -> Estimate:
    """Return what quantizing needs. One layer is at hand at a time, so only disk and time grow with their
    number (`calibrate/estimate.py`).

    Mixed precision, a guide and tuning add their own passes; the peak is that of the largest.
    """
    arch = facts.arch
    scheme = possible_schemes(spec, arch)[-1]
    check_model(spec, arch)
    if not spec.needs_activations:
        return _data_free(spec, scheme, facts)
    calib = calibration_of(facts)
    if spec.tune is not None:
        check_num_samples(spec.tune, calib.num_samples)
    work = Workload(
        arch,
        calib.num_samples,
        calib.seq_len,
        facts.device,
        facts.num_ranks,
        compares=spec.target is not None,
        factorises=isinstance(spec.round, Gptq) or spec.target is not None,
        true_sequential=spec.true_sequential,
        guided=spec.guide is not None,
    )
    notes = (*_notes(spec, scheme, arch), *_expert_notes(spec, work))
    layers = Estimate(
        peak_bytes(work),
        most_linear_bytes(spec, arch) + outer_bytes(arch, spec.head_scheme),
        sum(flops(work, products=_products(spec, facts.device))),
        num_launches=_launches(spec, facts.device, num_columns(work)),
        notes=notes,
        in_tiles=work.in_tiles,
    )
    found = layers
    if isinstance(spec.scheme, Mixed):
        found = _with_pass(found, *_sensitivity_effort(spec.scheme, work))
    host = host_bytes(work)
    if host:
        note = f"{host / 2**30:.1f} GiB of pinned host memory a GPU, for the layer that is read ahead"
        found = _with_note(found, note)
    if spec.guide is not None:
        held, operations = guide_effort(work, spec.guide)
        found = _with_pass(found, 0 if host else held, operations)
        if host:
            note = f"{held / 2**30:.1f} GiB of host memory for the gradients that guide the calibration"
            found = _with_note(found, note)
    if spec.tune is not None and scheme is not None:
        found = _with_pass(found, *_tuning_effort(spec.tune, work, linear_bytes(arch, scheme)))
    return found


def _data_free(spec: Quantize, scheme: ModelScheme | None, facts: PlanFacts) -> Estimate:
    """Return what quantizing without a forward pass needs: the bytes that are read and written decide its
    time.

    A CPU holds what is outside of the layers, which is written while the first layer is rounded, the layer
    that is read ahead, the layer that is rounded, its codes, and the words that codes of few bits are packed
    into. A GPU holds the layer that is rounded, and the float32 copies of one linear.
    """
    arch = facts.arch
    head = spec.head_scheme
    itemsize = itemsize_of(arch)
    written = linear_bytes(arch, scheme) + outer_bytes(arch, head)
    shapes = [[each.linear_shape(name, arch.hidden_size) for name in each.linears] for each in arch.layers]
    sizes = [[rows * columns for rows, columns in of_layer] for of_layer in shapes]
    layer = max(map(sum, sizes))
    packs = scheme is not None and any(each.num_bits < 8 for each in scheme.all)
    if facts.device == "cpu":
        words = layer // 2 if packs else 0
        peak = ROUNDING_LIBRARY_BYTES + outer_bytes(arch, None) + (2 * itemsize + 1) * layer + words
    else:
        peak = (itemsize + 1) * layer + 4 * STACK_COPIES * max(map(max, sizes))
    note = "no calibration text and no forward pass: read, round, write"
    head_moved = 0 if head is None else 2 * outer_bytes(arch, None)  # it is read again, and written in codes
    return Estimate(
        peak,
        written,
        0.0,
        notes=(*_notes(spec, scheme, arch), note),
        moved_bytes=itemsize * arch.num_params + written + head_moved,
    )


def _notes(spec: Quantize, scheme: ModelScheme | None, arch: Arch) -> tuple[str, ...]:
    kv_format = spec.kv_format()
    cache = (
        ()
        if kv_format is None
        else (f"KV cache {kv_format}, {kv_bytes_per_token(arch, kv_format):,} bytes a token",)
    )
    own = (_scheme_note(spec, scheme, arch), f"{spec.preset or 'method'}: {spec.method()}")
    return *own, *cache, *_latent_notes(arch), *_indexer_notes(arch)


def _latent_notes(arch: Arch) -> tuple[str, ...]:
    """Return what the runtime keeps of a model with latent attention, recurrences or convolutions."""
    if arch.states:
        what = "recurrences" if arch.has_recurrences else "convolutions"
        return (f"{what}: the runtime keeps states of {slot_bytes(arch, 1):,} bytes a request",)
    if is_compressed(arch):
        cached = (
            f"{arch.cached_numbers:,} numbers a token, of which its entries are computed anew in each step"
        )
        return (f"compressed attention: the runtime caches {cached}",)
    if not arch.has_latents:
        return ()
    of_heads = sum(layer.num_kv_heads * (layer.head_dim + layer.value_dim) for layer in arch.layers)
    cached = f"{arch.cached_numbers:,} numbers a token for {of_heads:,} of all heads"
    return (f"latent attention: the runtime caches {cached}",)


def _indexer_notes(arch: Arch) -> tuple[str, ...]:
    """Return what the runtime caches for indexers where they choose some keys."""
    more = arch.numbers_cached(arch.max_position) - arch.cached_numbers
    if not more:
        return ()
    shortest = min(layer.indexer.top_k for layer in arch.layers if layer.indexer is not None)
    return (f"indexers: {more:,} numbers a token more for contexts of more than {shortest:,} tokens",)


def _expert_notes(spec: Quantize, work: Workload) -> tuple[str, ...]:
    """Return how many tokens the calibration text gives an expert, and what becomes of one with fewer than
    the recipe wants."""
    facts = next((layer.experts for layer in work.arch.layers if layer.experts is not None), None)
    if facts is None:
        return ()
    policy = ExpertPolicy() if spec.experts is None else spec.experts.policy()
    chosen = facts.top_k - facts.always
    tokens = work.num_samples * work.seq_len * chosen // facts.num_chosen
    if policy.starved == "all_tokens":
        return (f"experts: the statistics of all {facts.num_experts} are taken from all tokens",)
    completes = {"shrink": "completed with tokens of the whole layer", "keep": "kept as they are"}
    starved = f"statistics of fewer than {policy.min_tokens} tokens are {completes[policy.starved]}"
    short = "; most are starved, a longer calibration text helps" if tokens < policy.min_tokens else ""
    each = f"about {tokens:,} tokens each if all {facts.num_experts} are chosen alike"
    return (f"experts: {each}, {starved}{short}",)


def _with_pass(found: Estimate, peak: int, operations: float) -> Estimate:
    """Return the estimate with one more pass over the model, of that peak in bytes and so many operations."""
    return replace(found, peak_bytes=max(found.peak_bytes, peak), flops=found.flops + operations)


def _with_note(found: Estimate, note: str) -> Estimate:
    return replace(found, notes=(*found.notes, note))


def _visits(spec: Quantize) -> tuple[int, int]:
    """Return how often descent visits every code: with all rows at once, and with the rows in phases."""
    return (spec.refine.sweeps, spec.refine.coupled_rounds) if isinstance(spec.refine, Descent) else (0, 0)


def _products(spec: Quantize, device: str) -> float:
    """Return the cost of all products of a weight with its statistic, in products at the assumed rate.

    These are the error before and after, each with the norm that it is divided by; a loss for each scale that
    AWQ tries; and in float32 the factors of GPTQ and their use, the sweeps of descent, and rounding targets
    (in float64, counted twice).
    """
    if spec.only_cache:
        return 0.0
    losses = 4 + (2 * spec.smooth.num_ratios + 1 if isinstance(spec.smooth, Awq) else 0)
    factors = 2 if isinstance(spec.round, Gptq) else 0
    targets = 6 if spec.target is not None else 0
    return LOSS_COST[device] * losses + EXACT_COST[device] * (factors + 2 * sum(_visits(spec)) + targets)


def _launches(spec: Quantize, device: str, num_columns: int) -> int:
    """Return the number of small operations that run one after the other.

    A CPU takes the time of three for each column that is rounded or descended, and of less than one for a
    column of which a phase holds only some rows. On a GPU a block of columns is one launch: descending it
    takes as long as thirteen small operations (190 us on an H200, 8B shape), and a product follows. The loop
    of GPTQ and the search of scales take 18 us a column there, both counted in.
    """
    if spec.only_cache:
        return 0
    rounds = isinstance(spec.round, Gptq)
    searches = getattr(spec.round, "scale", "min_max") != "min_max"
    sweeps, coupled = _visits(spec)
    if device == "cpu":
        return int((3 * (rounds + sweeps) + 0.6 * coupled * NUM_ROW_SETS) * num_columns)
    visits = sweeps + coupled * NUM_ROW_SETS
    return (rounds + searches) * num_columns // 2 + 14 * visits * num_columns // COLUMNS_PER_LAUNCH


def _tuning_effort(tune: Tune, work: Workload, num_code_bytes: int) -> tuple[int, float]:
    """Return peak bytes and operations of tuning scales.

    The source's model is held next to the codes, whose scales train in float32 with a gradient and two
    moments. For the backward pass a layer keeps its input of a batch, or all its values where it is not
    computed again.
    """
    arch = work.arch
    batch = tune.batch_size * work.seq_len
    recomputed = batch > RECOMPUTED_TOKENS
    kept = 1 if recomputed else 12
    passes = (
        10 if recomputed else 8
    )  # two a forward: teacher, student, recomputation; a backward is two forwards
    params = arch.num_active_linear_params + arch.vocab_size * arch.hidden_size
    activations = kept * batch * arch.stream_size * arch.num_layers * work.value_bytes
    held = work.value_bytes * arch.num_params + 2 * num_code_bytes + activations
    return held, float(passes) * params * tune.epochs * work.num_samples * work.seq_len


def _scheme_note(spec: Quantize, scheme: ModelScheme | None, arch: Arch) -> str:
    if not isinstance(spec.scheme, Mixed):
        return f"{DENSE if scheme is None else scheme.name}, {arch.num_layers} layers one at a time"
    return (
        f"each linear group of {arch.num_layers} layers gets one of {', '.join(spec.scheme.schemes)}: the "
        f"least predicted KL with {spec.scheme.budget.text}; linears of layers at most "
        f"{most_linear_bytes(spec, arch) / 1e9:.3f} GB"
    )


def _sensitivity_effort(spec: Mixed, work: Workload) -> tuple[int, float]:
    """Return peak bytes and operations of measuring sensitivities.

    The inputs of every layer are kept. Of one layer there are its weights, a copy of them for each scheme,
    its statistics, and what the search for scales takes for one linear.
    """
    arch = work.arch
    num_tokens = min(spec.num_samples, work.num_samples) * work.seq_len
    schemes = [scheme for scheme in map(scheme_or_dense, spec.schemes) if scheme is not None]
    of_layers = [
        [layer.linear_shape(name, arch.hidden_size) for name in layer.linears] for layer in arch.layers
    ]
    sizes = [sum(n * k for n, k in shapes) for shapes in of_layers]
    params = max(sizes)
    layer = arch.layers[sizes.index(params)]
    largest = max(n * k for shapes in of_layers for n, k in shapes)
    moments = 4 * sum(layer.group_shape(group, arch.hidden_size)[1] ** 2 for group in layer.groups)
    peak = (arch.num_layers + 1) * num_tokens * arch.stream_size * work.value_bytes
    peak += params * work.value_bytes * (1 + len(schemes)) + 2 * moments
    peak += 8 * 4 * largest + 6 * 4 * work.seq_len * arch.vocab_size
    # four for two forwards, one with statistics, and a backward; a scheme that rounds inputs takes two more
    # products, others one
    products = 4 + sum(1 if scheme.activation is None else 2 for scheme in schemes)
    walks = products * 2.0 * arch.num_active_linear_params * num_tokens
    searches = sum(
        2.0 * GRID_SIZE * n * k * (scheme.group_size or k)
        for scheme in schemes
        for shapes in of_layers
        for n, k in shapes
    )
    return peak, walks + searches
