"""What is measured: methods by name, as a recipe says them, and the methods that mean something in each
scheme."""

from collections.abc import Mapping
from typing import Any

MIN_MAX = {"kind": "rtn", "scale": "min_max"}
SEARCH = {"kind": "rtn", "scale": "hessian"}

METHODS: Mapping[str, Mapping[str, Any]] = {
    "rtn": {"round": MIN_MAX},
    "rtn+search": {"round": SEARCH},
    "gptq": {"round": {"kind": "gptq", "scale": "min_max"}},
    "gptq+search": {"round": {"kind": "gptq", "scale": "hessian"}},
    "gptq+search+in-turn": {"round": {"kind": "gptq", "scale": "hessian"}, "true_sequential": True},
    "rtn+search+descent": {"round": SEARCH, "refine": {"kind": "descent"}},
    "gptq+search+codes": {
        "round": {"kind": "gptq", "scale": "hessian"},
        "refine": {"kind": "descent", "refit": False},
    },
    "awq-scales": {"smooth": {"kind": "awq"}, "round": MIN_MAX},
    "awq": {"smooth": {"kind": "awq"}, "round": SEARCH},
    "awq+gptq": {"smooth": {"kind": "awq"}, "round": {"kind": "gptq", "scale": "hessian"}},
    "smoothquant": {"smooth": {"kind": "smoothquant"}, "round": MIN_MAX},
    "gptq+search+descent": {"round": {"kind": "gptq", "scale": "hessian"}, "refine": {"kind": "descent"}},
    "gptaq+search+descent": {
        "target": {"kind": "gptaq"},
        "round": {"kind": "gptq", "scale": "hessian"},
        "refine": {"kind": "descent"},
    },
    "in-turn": {  # the same, linears of a layer one after the other
        "target": {"kind": "gptaq"},
        "round": {"kind": "gptq", "scale": "hessian"},
        "refine": {"kind": "descent"},
        "true_sequential": True,
    },
    "guided": {  # and tokens that count by their gradients
        "guide": {"kind": "gradients"},
        "target": {"kind": "gptaq"},
        "round": {"kind": "gptq", "scale": "hessian"},
        "refine": {"kind": "descent"},
        "true_sequential": True,
    },
    "balanced": {
        "preset": "balanced"
    },  # and rows that know of each other's errors; `preset: fast` is rtn+search
    "best": {"preset": "best"},
}
W4 = ("W4A16_G128", "W4A16_G32", "W8A16")
FP8 = ("FP8_DYNAMIC", "dense")
MIXED: Mapping[str, Mapping[str, Any]] = {
    name: {"kind": "mixed", "schemes": schemes, "budget": {"size_ratio": ratio}}
    for name, schemes, ratio in (
        ("mixed-w4-as-g32", W4, 0.28125),  # the bytes of W4A16_G32
        ("mixed-w4", W4, 0.2965),  # those of W4A16_G128 and 15 % more
        ("mixed-fp8", FP8, 0.75),
    )
}
"""What a recipe says for a scheme that is chosen linear by linear, of so many of the bytes of 16-bit
weights."""
FEW_BITS = ("rtn", "rtn+search", "gptq+search", "balanced", "best")
"""The methods that schemes of few bits are measured with."""
SUITE: Mapping[str, tuple[str, ...]] = {
    "W4A16_G128": tuple(name for name in METHODS if name != "smoothquant"),
    "W4A16_G128_ASYM": ("rtn", "balanced", "best"),
    "W4A16_G64": ("rtn", "balanced"),
    "W4A16_G32": ("rtn", "balanced"),
    "W4A16_CHANNEL": ("rtn", "balanced"),
    "W4A8_FP8": ("rtn", "gptq", "balanced", "best"),
    "W3A16_G128": FEW_BITS,
    "W3A16_G64": FEW_BITS,
    "W2A16_G128": FEW_BITS,
    "W2A16_G64": FEW_BITS,
    "NVFP4": FEW_BITS,
    "MXFP4": FEW_BITS,
    "NVFP4_W4A4": ("rtn", "gptq+search", "balanced"),
    "MXFP4_W4A4": ("rtn", "gptq+search", "balanced"),
    "MXFP8": ("rtn", "balanced"),
    "W8A16": ("rtn",),
    "FP8_DYNAMIC": ("rtn", "gptq"),
    "FP8_STATIC": ("rtn",),
    "FP8_BLOCK": ("rtn",),
    "INT8_DYNAMIC": ("rtn", "smoothquant"),
    "INT8_DYNAMIC_ASYM": ("rtn", "smoothquant"),
    "INT8_STATIC": ("rtn", "smoothquant"),
    "INT8_STATIC_ASYM": ("rtn", "smoothquant"),
    "mixed-w4-as-g32": ("balanced",),
    "mixed-w4": ("balanced",),
    "mixed-fp8": ("rtn",),
}
"""Scheme -> its methods, in the order of the table. Where weights have 8 bits, searching for scales and codes
has little left to find."""
