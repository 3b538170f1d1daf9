"""Three journeys through the code: a weight, a calibration batch and a request, at most twelve files each."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Stop:
    """One file of a journey: the class or function to read there, and what it does."""

    path: str
    symbol: str
    does: str


@dataclass(frozen=True)
class Journey:
    """What is followed, and where it comes through."""

    name: str
    title: str
    stops: tuple[Stop, ...]


WEIGHT = Journey(
    "weight",
    "A weight, from the checkpoint to a kernel",
    (
        Stop(
            "compress/models/family.py",
            "Family",
            "Names the canonical module of every tensor and refuses a config it does not understand; one table a family in models/archs.",
        ),
        Stop(
            "compress/models/checkpoint.py",
            "Checkpoint",
            "Streams the safetensors, one layer at a time, under canonical names such as layers.3.attn.q.weight.",
        ),
        Stop(
            "compress/calibrate/sequential.py",
            "run_sequential",
            "Puts one layer on the device, observes it, lets the passes change it, and stores it.",
        ),
        Stop(
            "compress/methods/quantize/passes.py",
            "QuantizePass",
            "Applies the smoother, the rounding target, the rounder and the refiner to each linear group.",
        ),
        Stop(
            "compress/methods/quantize/gptq.py",
            "Gptq",
            "Turns weights [O, I] into codes, column by column; later columns absorb the error.",
        ),
        Stop(
            "compress/quant/scheme.py",
            "QuantizedWeight",
            "Holds codes, scale and zero point; dequantizes them.",
        ),
        Stop("compress/quant/packing.py", "pack", "Packs eight 4-bit codes into one 32-bit word."),
        Stop(
            "compress/export/compressed_tensors.py",
            "CompressedTensors",
            "Names the packed tensors as vLLM and transformers expect them.",
        ),
        Stop(
            "compress/artifact/workspace.py",
            "Workspace",
            "Takes the digest of every tensor and gives the finished directory its name by one rename.",
        ),
        Stop("compress/runtime/loader.py", "load", "Reads the artifact, and stacks the linears of a group."),
        Stop(
            "compress/kernels/select.py",
            "select",
            "Chooses a kernel for each linear; every other candidate states why it refuses.",
        ),
    ),
)
JOURNEYS = (WEIGHT,)
