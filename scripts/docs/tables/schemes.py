"""Tables of what a recipe may name: schemes, formats of the published checkpoint, and gates."""

from scripts.docs.markdown import table
from scripts.docs.tables import performance, quality

ROWS = (
    (
        "`W4A16_G128`, `W4A16_G128_ASYM`",
        "4-bit integers, a scale for each 128 inputs; `_ASYM` with a zero point",
        "16 bits",
        "from sm_80",
    ),
    (
        "`W4A16_G64`, `W4A16_G32`, `W4A16_CHANNEL`, each also `_ASYM`",
        "the same in smaller scale groups, or a scale an output channel",
        "16 bits",
        "from sm_80, tuned from sm_90",
    ),
    (
        "`W3A16_G128`, `W3A16_G64`, `W2A16_G128`, `W2A16_G64`, each also `_ASYM`",
        "3-bit and 2-bit integers, a scale for each 128 or 64 inputs",
        "16 bits",
        "from sm_80: the kernels of 4 bits, which hold a code in 4 bits",
    ),
    (
        "`W4A8_FP8`",
        "4-bit integers from -7 to 7, a scale for each 128 inputs",
        "e4m3, a scale a token, found while serving",
        "sm_90, in FP8; from sm_80 the kernels of W4A16",
    ),
    (
        "`NVFP4`, `MXFP4`",
        "e2m1; an e4m3 scale for each 16 inputs and a float32 scale for all, or a power of two for each 32",
        "16 bits",
        "from sm_80, tuned from sm_90, multiplied in 16 bits; of `MXFP4` not in float16",
    ),
    (
        "`NVFP4_W4A4`, `MXFP4_W4A4`; `MXFP8`",
        "the same as in `NVFP4` and `MXFP4`; e4m3, a power of two for each 32 inputs",
        "in the weights' own form, block scales found while serving; of `NVFP4_W4A4` one float32 scale an "
        "input, calibrated",
        "none: made for sm_100, computed by the reference",
    ),
    ("`W8A16`", "8-bit integers, a scale an output channel", "16 bits", "from sm_80, tuned from sm_90"),
    (
        "`INT8_DYNAMIC`, `INT8_STATIC`, each also `_ASYM`",
        "8-bit integers, a scale an output channel",
        "8-bit integers; a scale a token, found while serving, or one scale an input, calibrated; `_ASYM` "
        "with a zero point beside it",
        "from sm_80, decoding by warpgroup instructions on sm_90",
    ),
    (
        "`FP8_DYNAMIC`, `FP8_STATIC`",
        "e4m3, a scale an output channel",
        "e4m3; a scale a token, found while serving, or one scale an input, calibrated",
        "prefill from sm_90, decoding from sm_80",
    ),
    (
        "`FP8_BLOCK`",
        "e4m3, a scale a block of 128 x 128, as DeepSeek-V3",
        "e4m3, a scale a token and 128 inputs, found while serving",
        "from sm_80, tuned from sm_90 (prefill with CUDA 12.9)",
    ),
)


def schemes() -> str:
    """Return the table of schemes.

    Raises:
        LookupError: a scheme of the package is missing in the table.
    """
    from compress.quant import scheme

    text = " ".join(row[0] for row in ROWS)
    missing = [name for name in scheme.SCHEMES if name.removesuffix("_ASYM") not in text]
    if missing:
        raise LookupError(f"the table of schemes lacks {', '.join(missing)}")
    return table(["scheme", "weights", "inputs of the linears", "fast kernel on a GPU"], ROWS)


def formats() -> str:
    """Return the names of the formats that `export` writes."""
    from compress.export import FORMATS

    return ", ".join(f"`{name}`" for name in FORMATS.names())


def gates() -> str:
    """Return the table of metrics that a gate may name."""
    from compress.validate.gates import METRICS

    rows = [
        [
            f"`{name}`",
            "at most" if metric.relation == "<=" else "at least",
            "for a device" * metric.per_device,
        ]
        for name, metric in METRICS.items()
    ]
    return table(["gate", "good is", "limit"], rows)


def accuracy() -> str:
    """Return the table of accuracy by scheme."""
    ours = (
        ("W4A16_G128", "best", "`preset: best`"),
        ("W4A16_G128", "balanced", "`preset: balanced`"),
        ("W4A16_G128", "gptq+search", "`round: {kind: gptq}`"),
        ("W4A16_G128", "rtn+search", "`preset: fast`"),
        ("FP8_DYNAMIC", "gptq", "`round: {kind: gptq}`"),
        ("FP8_BLOCK", "rtn", "`round: {kind: rtn}`"),
        ("INT8_DYNAMIC", "smoothquant", "`smooth: {kind: smoothquant}`"),
    )
    rows = []
    for scheme, method, recipe in ours:
        each = quality.average(method, scheme)
        rows.append(
            [
                f"`{scheme}`",
                recipe,
                f"{each['kl_mean']:.4f}",
                f"{100 * each['top1']:.1f} %",
                f"x {each['ppl_ratio']:.3f}",
            ]
        )
    header = ["scheme", "made by", "mean KL", "top-1", "perplexity"]
    return table(header, rows, align="llrrr")


def speed() -> str:
    """Return the table of the gain in time a token by scheme and batch."""
    row = performance.runtime_run().rows[0]
    batches = sorted({each["batch_size"] for each in performance.runtime_run().rows})
    rows = [
        [performance.scheme_text(name), *(f"{performance.speedup(name, batch):.2f} x" for batch in batches)]
        for name in dict.fromkeys(each["scheme"] for each in performance.runtime_run().rows)
        if name != row["scheme"]
    ]
    header = ["weights", *(f"batch {batch}" for batch in batches)]
    return table(header, rows, align="l" + "r" * len(batches))


def presets() -> str:
    """Return the table of presets: what each fills in, and what it keeps and takes."""
    from compress.stages.quantize.spec import PRESETS

    methods = {"fast": "rtn+search", "balanced": "balanced", "best": "best"}
    rows = []
    for name, settings in PRESETS.items():
        each = quality.average(methods[name])
        settings_text = quality.recipe_text(settings)
        rows.append([f"`{name}`", f"{each['kl_mean']:.4f}", f"{each['seconds']:.1f} s", f"`{settings_text}`"])
    header = ["`preset`", "mean KL of the bundled model", "time on it", "stands for"]
    return table(header, rows, align="lrrl")


def consumers() -> str:
    """Return the table of programs that load each scheme, as the formats state it."""
    from compress.export import FORMATS
    from compress.models.family import family_of
    from compress.models.known import known_config
    from compress.quant.model_scheme import ModelScheme
    from compress.quant.scheme import SCHEMES

    config = known_config("meta-llama/Llama-3.1-8B")
    assert config is not None, "the shape ships with the package"
    arch = family_of(config).read_config(config)
    main = FORMATS.get("compressed-tensors")
    programs = ("vLLM", "vLLM on a CPU", "transformers")
    rows: dict[tuple[str, ...], list[str]] = {}
    for name, scheme in SCHEMES.items():
        whole = ModelScheme(scheme)
        found = {each.name: each for each in main.consumers(arch, whole)}
        cells = tuple(
            found[program].note if found[program].loads else f"**no**: {found[program].note}"
            for program in programs
        )
        others = [
            f"`{form}`"
            for form, each in FORMATS.items()
            if each is not main and not each.broken_rules(arch, whole)
        ]
        rows.setdefault((*cells, ", ".join(others)), []).append(f"`{name}`")
    header = ["scheme", *programs, "other formats that take it"]
    return table(header, [[", ".join(names), *cells] for cells, names in rows.items()])
