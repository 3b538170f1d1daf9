"""Tables of what a recipe may name: schemes, formats of the published checkpoint, and gates."""

from scripts.docs.markdown import table

SCHEMES = (
    (
        "`W4A16_G128`, `W4A16_G128_ASYM`",
        "4-bit integers, a scale for each 128 inputs; `_ASYM` with a zero point",
        "16 bits",
        "sm_80 and newer",
    ),
    (
        "`W4A16_G64`, `W4A16_G32`, `W4A16_CHANNEL`, each also `_ASYM`",
        "the same in smaller scale groups, or a scale an output channel",
        "16 bits",
        "runs dequantized",
    ),
    ("`W8A16`", "8-bit integers, a scale an output channel", "16 bits", "runs dequantized"),
    (
        "`INT8_DYNAMIC`",
        "8-bit integers, a scale an output channel",
        "8-bit integers, a scale a token",
        "reference kernel",
    ),
    (
        "`FP8_DYNAMIC`",
        "e4m3, a scale an output channel",
        "e4m3, a scale a token, found while serving",
        "prefill sm_90, decoding sm_80 and newer",
    ),
    ("`FP8_STATIC`", "the same", "e4m3, one scale an input, calibrated", "the same"),
    (
        "`FP8_BLOCK`",
        "e4m3, a scale a block of 128 x 128, as DeepSeek-V3",
        "e4m3, a scale a token and 128 inputs, found while serving",
        "reference kernel",
    ),
)


def schemes() -> str:
    """Return the table of schemes.

    Raises:
        LookupError: a scheme of the package is missing in the table.
    """
    from compress.quant import scheme

    text = " ".join(row[0] for row in SCHEMES)
    missing = [name for name in scheme.SCHEMES if name.removesuffix("_ASYM") not in text]
    if missing:
        raise LookupError(f"the table of schemes lacks {', '.join(missing)}")
    return table(["scheme", "weights", "inputs of the linears", "on a GPU"], SCHEMES)


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
