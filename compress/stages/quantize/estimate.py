"""What quantizing will need, from shapes alone: bytes at its peak and on disk, operations and launches, for
`compress plan`."""

from compress.calibrate.estimate import Work, flops, guide_effort, host_bytes, num_columns, peak_bytes
from compress.methods.quantize.awq import Awq
from compress.methods.quantize.descent import PHASES, Descent
from compress.methods.quantize.gptq import Gptq
from compress.models.arch import Arch
from compress.quant.numerics import GRID_SIZE
from compress.quant.scheme import DENSE, ModelScheme
from compress.runtime.kv_cache import kv_bytes_per_token
from compress.stages import Estimate, PlanFacts
from compress.stages.budget.spec import Mixed, scheme_or_dense
from compress.stages.calibrate import Calibrate
from compress.stages.quantize.sizes import linear_bytes, most_linear_bytes, outer_bytes
from compress.stages.quantize.spec import Quantize
from compress.stages.quantize.tune import RECOMPUTED_TOKENS, Tune

COLUMNS_OF_A_LAUNCH = 128
"""That are rounded, or descended, in one on a GPU (`kernels/columns`)."""
LOSS = {"cpu": 1.0, "cuda": 1.5}
EXACT = {"cpu": 1.0, "cuda": 5.0}
"""Cost of a product of a weight with its statistic, in products at the assumed rate: of one that decides or
reports, on a GPU three in bf16 with what surrounds them, and of one in float32 (51 against 250 TFLOP/s,
H200)."""


def estimate(spec: Quantize, facts: PlanFacts) -> Estimate:
    """One layer at a time, so nothing but the disk and the time grows with their number; see
    `calibrate/estimate.py`. With a target, also the activations of the source model, and their moments with
    the others."""
    arch = facts.arch
    scheme = spec.possible_schemes(facts.arch)[-1]
    spec.check_model(arch)
    calib = facts.specs.get("calibrate") or Calibrate()
    assert isinstance(calib, Calibrate)
    work = Work(
        arch,
        calib.num_samples,
        calib.seq_len,
        facts.device,
        facts.num_ranks,
        compares=spec.target is not None,
        factorises=isinstance(spec.round, Gptq) or spec.target is not None,
        true_sequential=spec.true_sequential,
    )
    kv_format = spec.kv_format()
    kv_note = (
        []
        if kv_format is None
        else [f"KV cache {kv_format}, {kv_bytes_per_token(arch, kv_format):,} bytes a token"]
    )
    peak = peak_bytes(work)
    total = sum(flops(work, products=_products(spec, facts.device)))
    if isinstance(spec.scheme, Mixed):
        before, more = _effort(
            spec.scheme, arch, num_samples=calib.num_samples, seq_len=calib.seq_len, width=work.width
        )
        peak = max(peak, before)
        total = total + more
    host = host_bytes(work)
    on_host = (
        [f"{host / 2**30:.1f} GiB of pinned host memory a GPU, for the layer that is read ahead"]
        if host
        else []
    )
    if spec.guide is not None:
        held, more = guide_effort(work, spec.guide)
        peak = peak if host else max(peak, held)
        total = total + more
        on_host += (
            [f"{held / 2**30:.1f} GiB of host memory for the gradients that guide the calibration"]
            if host
            else []
        )
    if spec.tune is not None and scheme is not None:
        held, more = _tuning_effort(spec.tune, arch, work, linear_bytes(arch, scheme))
        peak = max(peak, held)
        total = total + more
    return Estimate(
        peak,
        most_linear_bytes(spec, arch) + outer_bytes(arch, spec.head_scheme),
        total,
        num_launches=_launches(spec, facts.device, num_columns(work)),
        notes=(
            _scheme_note(spec, scheme, arch),
            f"{spec.preset or 'method'}: {spec.method()}",
            *kv_note,
            *on_host,
        ),
        in_tiles=work.in_tiles,
    )


def _sweeps(spec: Quantize) -> tuple[int, int]:
    """Visits to every code: of all rows at once, and of rows by phases."""
    return (spec.refine.sweeps, spec.refine.coupled_rounds) if isinstance(spec.refine, Descent) else (0, 0)


def _products(spec: Quantize, device: str) -> float:
    """The error before and after, each beside what it is a share of, a loss for each scale that AWQ tries,
    and what is done in float32: factors and their use, sweeps, and targets (in float64, as two)."""
    if spec.only_cache:
        return 0.0
    losses = 4 + (2 * spec.smooth.num_ratios + 1 if isinstance(spec.smooth, Awq) else 0)
    exact = (
        (2 if isinstance(spec.round, Gptq) else 0)
        + 2 * sum(_sweeps(spec))
        + (6 if spec.target is not None else 0)
    )
    return LOSS[device] * losses + EXACT[device] * exact


def _launches(spec: Quantize, device: str, num_columns: int) -> int:
    """Small operations one after the other. A CPU takes the time of three for each column that is rounded or
    descended, and of less than one where only the rows of a phase are. On a GPU a block of columns is one
    launch: where it is descended it takes as long as thirteen small ones (190 us on an H200, 8B shape), with
    a product behind it, and what GPTQ's loop and the search of scales take is still best said by columns: 18
    us for both there."""
    if spec.only_cache:
        return 0
    rounds = isinstance(spec.round, Gptq)
    searches = getattr(spec.round, "scale", "min_max") != "min_max"
    sweeps, coupled = _sweeps(spec)
    visits = sweeps + coupled * PHASES
    if device == "cpu":
        return int((3 * (rounds + sweeps) + 0.6 * coupled * PHASES) * num_columns)
    return (rounds + searches) * num_columns // 2 + 14 * visits * num_columns // COLUMNS_OF_A_LAUNCH


def _tuning_effort(tune: Tune, arch: Arch, work: Work, num_code_bytes: int) -> tuple[int, float]:
    """Peak bytes and operations of tuning scales: the source's model beside codes, whose scales train in
    float32 with a gradient and two moments, and the inputs of the layers of a batch, or all that a layer
    keeps where it does not run again."""
    batch = tune.batch_size * work.seq_len
    kept = 1 if batch > RECOMPUTED_TOKENS else 12
    passes = (
        8 if kept > 1 else 10
    )  # twice a forward for the teacher, the student and its recomputation; backward twice that
    params = arch.num_linear_params + arch.vocab_size * arch.hidden_size
    held = (
        work.width * arch.num_params
        + 2 * num_code_bytes
        + kept * batch * arch.hidden_size * arch.num_layers * work.width
    )
    return held, float(passes) * params * tune.epochs * work.num_samples * work.seq_len


def _scheme_note(spec: Quantize, scheme: ModelScheme | None, arch: Arch) -> str:
    if not isinstance(spec.scheme, Mixed):
        return f"{DENSE if scheme is None else scheme.name}, {arch.num_layers} layers one at a time"
    return (
        f"each projection of {arch.num_layers} layers gets one of {', '.join(spec.scheme.schemes)}: the "
        "least predicted KL with "
        f"{spec.scheme.budget.text}; linears of layers at most {most_linear_bytes(spec, arch) / 1e9:.3f} GB"
    )


def _effort(spec: Mixed, arch: Arch, *, num_samples: int, seq_len: int, width: int) -> tuple[int, float]:
    """Peak bytes and floating-point operations of the sensitivities: inputs of every layer are kept, a layer
    is there once for each scheme, with its statistics and what the search for scales makes of one linear."""
    num_tokens = min(spec.num_samples, num_samples) * seq_len
    schemes = [scheme for scheme in map(scheme_or_dense, spec.schemes) if scheme is not None]
    layer = max(arch.layers, key=lambda each: each.intermediate_size)
    shapes = [layer.linear_shape(name, arch.hidden_size) for name in layer.linears]
    params = sum(n * k for n, k in shapes)
    largest = max(n * k for n, k in shapes)
    hessians = 4 * sum(
        {
            layer.linears[name]: layer.linear_shape(name, arch.hidden_size)[1] ** 2 for name in layer.linears
        }.values()
    )
    peak = (arch.num_layers + 1) * num_tokens * arch.hidden_size * width
    peak += (
        params * width * (1 + len(schemes))
        + 2 * hessians
        + 8 * 4 * largest
        + 6 * 4 * seq_len * arch.vocab_size
    )
    products = 4 + sum(
        1 if scheme.activation is None else 2 for scheme in schemes
    )  # two forwards, one with statistics, one backward
    walks = products * 2.0 * arch.num_linear_params * num_tokens
    searches = (
        sum(2.0 * GRID_SIZE * n * k * (scheme.group_size or k) for scheme in schemes for n, k in shapes)
        * arch.num_layers
    )
    return peak, walks + searches
