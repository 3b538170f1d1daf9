"""What is measured: methods by name, as a recipe says them, and the methods that mean something in each scheme."""

from collections.abc import Mapping
from typing import Any

MIN_MAX, SEARCH = {"kind": "rtn", "scale": "min_max"}, {"kind": "rtn", "scale": "hessian"}

METHODS: Mapping[str, Mapping[str, Any]] = {
    "rtn": {"round": MIN_MAX},
    "rtn+search": {"round": SEARCH},
    "gptq": {"round": {"kind": "gptq", "scale": "min_max"}},
    "gptq+search": {"round": {"kind": "gptq", "scale": "hessian"}},
    "rtn+search+descent": {"round": SEARCH, "refine": {"kind": "descent"}},
    "gptq+search+codes": {"round": {"kind": "gptq", "scale": "hessian"}, "refine": {"kind": "descent", "refit": False}},
    "awq-scales": {"smooth": {"kind": "awq"}, "round": MIN_MAX},
    "awq": {"smooth": {"kind": "awq"}, "round": SEARCH},
    "awq+gptq": {"smooth": {"kind": "awq"}, "round": {"kind": "gptq", "scale": "hessian"}},
    "smoothquant": {"smooth": {"kind": "smoothquant"}, "round": MIN_MAX},
    "gptq+search+descent": {"round": {"kind": "gptq", "scale": "hessian"}, "refine": {"kind": "descent"}},
    "balanced": {"preset": "balanced"},  # the same towards `target: gptaq`; `preset: fast` is rtn+search
}
SUITE: Mapping[str, tuple[str, ...]] = {
    "W4A16_G128": tuple(name for name in METHODS if name != "smoothquant"),
    "W4A16_G128_ASYM": ("rtn", "balanced"),
    "W4A16_G64": ("rtn", "balanced"),
    "W4A16_G32": ("rtn", "balanced"),
    "W4A16_CHANNEL": ("rtn", "balanced"),
    "W8A16": ("rtn",),
    "FP8_DYNAMIC": ("rtn", "gptq"),
    "FP8_STATIC": ("rtn",),
    "FP8_BLOCK": ("rtn",),
    "INT8_DYNAMIC": ("rtn", "smoothquant"),
}
"""Scheme -> its methods, in the order of the table. Where weights have 8 bits, searching for scales and codes has little left to find."""
