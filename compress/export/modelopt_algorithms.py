"""The algorithms (`quant_algo`) of unified checkpoints of NVIDIA Model Optimizer (`modelopt.py`): the scheme
that each states, and the programs that read it."""

from compress.export import Consumer, Rule
from compress.export.vllm import LATENTS, TRANSPOSED, why_vllm_refuses
from compress.models.arch import Arch
from compress.quant.model_scheme import ModelScheme
from compress.quant.scheme import SCHEMES, Scheme, weight_only_scheme

FP8 = "FP8"
FP8_ROWS = "FP8_PER_CHANNEL_PER_TOKEN"
INT8 = "W8A16"
INT4 = "W4A16_AWQ"
NVFP4 = "NVFP4"
NVFP4_WEIGHTS = "W4A16_NVFP4"
ALGORITHMS = {
    FP8: SCHEMES["FP8_STATIC"],
    FP8_ROWS: SCHEMES["FP8_DYNAMIC"],
    INT8: SCHEMES["W8A16"],
    INT4: SCHEMES["W4A16_G128"],
    NVFP4: SCHEMES["NVFP4_W4A4"],
    NVFP4_WEIGHTS: SCHEMES["NVFP4"],
}
"""quant_algo -> scheme; of W4A16_AWQ the one with its usual group size."""
AWQ_GROUPS = (64, 128)
"""Group sizes of TensorRT-LLM's kernel for four-bit weights."""
READERS = {
    FP8: ("vLLM", "TensorRT-LLM", "SGLang"),
    FP8_ROWS: ("vLLM", "TensorRT-LLM"),
    INT8: ("TensorRT-LLM",),
    INT4: ("TensorRT-LLM",),
    NVFP4: ("vLLM", "TensorRT-LLM", "SGLang"),
    NVFP4_WEIGHTS: ("vLLM",),
}
"""quant_algo -> the programs that read it, by their sources."""
PROGRAMS = ("vLLM", "TensorRT-LLM", "SGLang")


def algorithm_of(scheme: Scheme) -> str | None:
    """Return the quant_algo that states a scheme, None where there is none."""
    is_awq = scheme.group_size in AWQ_GROUPS and scheme == weight_only_scheme(
        4, symmetric=True, group_size=scheme.group_size
    )
    if is_awq:
        return INT4
    return next((algorithm for algorithm, each in ALGORITHMS.items() if each == scheme), None)


def why_no_algorithm(scheme: Scheme) -> Rule:
    """Return the reason why no quant_algo states a scheme."""
    if scheme.type == "int" and scheme.num_bits not in (4, 8):
        return Rule("bits", f"{scheme.num_bits} bits; 4 and 8 are written.")
    if scheme.block_rows > 1:
        return Rule(
            "blocks",
            f"{scheme.name}: FP8_PB_WO does not state how inputs are rounded, and programs differ; use fp8.",
        )
    if scheme.type == "int" and scheme.num_bits == 4 and scheme.symmetric and scheme.activation is None:
        sizes = " and ".join(map(str, AWQ_GROUPS))
        return Rule("group-size", f"groups of {scheme.group_size}; TensorRT-LLM takes {sizes}.")
    return Rule(
        "quant-algo",
        f"{scheme.name} is none of {', '.join(ALGORITHMS)}, which are written; use compressed-tensors.",
    )


def consumers_of(arch: Arch, scheme: ModelScheme) -> list[Consumer]:
    """Return the programs that may read a unified checkpoint of a model, and whether they do."""
    algorithm = str(algorithm_of(scheme.layers))
    on_blackwell = ", in FP4 from sm_100 on" if algorithm == NVFP4 else ""
    notes = {
        "vLLM": {
            FP8: "multiplies in FP8 from sm_89 on",
            FP8_ROWS: "multiplies in FP8 from sm_89 on",
            NVFP4: "multiplies in FP4 from sm_100 on, below that it takes the weights only, from sm_75",
            NVFP4_WEIGHTS: "multiplies four-bit floats with 16-bit inputs, from sm_75",
        }.get(algorithm, f"it has no {algorithm}; compressed-tensors has a form for it"),
        "TensorRT-LLM": f"reads {algorithm} by its sources{on_blackwell}; not run here",
        "SGLang": f"reads {algorithm} by its sources{on_blackwell}; not run here",
    }
    readers = READERS.get(algorithm, ())
    refused = why_vllm_refuses(arch, scheme) or (TRANSPOSED if arch.family == "gpt2" else None)
    if refused:
        notes["vLLM"] = refused
        readers = tuple(each for each in readers if each != "vLLM")
    return [
        Consumer("compress runtime", loads=True, note="any scheme that is exported"),
        Consumer(
            "transformers",
            loads=False,
            note="it does not know modelopt: it warns and computes nonsense of the codes",
        ),
        *(
            Consumer(
                each,
                loads=each in readers,
                note=notes[each] if each in readers or each == "vLLM" else f"it has no {algorithm}",
            )
            for each in PROGRAMS
        ),
        Consumer(
            "vLLM on a CPU",
            loads=algorithm == FP8_ROWS and not (arch.has_latents or refused),
            note=refused
            if refused
            else LATENTS
            if arch.has_latents
            else "weights and inputs in FP8, products in wider numbers, in bfloat16 or float16"
            if algorithm == FP8_ROWS
            else "it has no kernel for static inputs"
            if algorithm == FP8
            else f"it has no kernel for {algorithm}",
        ),
    ]
