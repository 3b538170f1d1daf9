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
    """A thing that is followed, and the files it passes."""

    name: str
    title: str
    stops: tuple[Stop, ...]


WEIGHT = Journey(
    "weight",
    "A weight, from the checkpoint to a kernel",
    (
        Stop(
            "compress/models/checkpoint.py",
            "Checkpoint",
            "Reads the safetensors one layer at a time, by the table of the family (models/family.py), "
            "under canonical names.",
        ),
        Stop(
            "compress/stages/quantize/layers.py",
            "quantize_layers",
            "Decides the scheme of each linear and the passes over a layer.",
        ),
        Stop(
            "compress/calibrate/sequential.py",
            "run_sequential",
            "Takes one layer after the other, and stores each as a resume point.",
        ),
        Stop(
            "compress/calibrate/at_once.py",
            "compress_at_once",
            "Observes the layer, and applies the passes to it.",
        ),
        Stop(
            "compress/methods/quantize/passes.py",
            "RoundPass",
            "Stacks the weights of a linear group and gives them to rounding target, rounder and refiner.",
        ),
        Stop(
            "compress/methods/quantize/gptq.py",
            "Gptq",
            "Turns weights [O, I] into codes and scales, column by column; later columns absorb the error.",
        ),
        Stop(
            "compress/models/canonical.py",
            "CanonicalStore",
            "The store between quantize and export: codes and scales under canonical names, as "
            "quant/codec.py spells them.",
        ),
        Stop(
            "compress/stages/export.py",
            "export",
            "Reads that store, and has a format write it.",
        ),
        Stop(
            "compress/export/compressed_tensors.py",
            "CompressedTensors",
            "Packs codes into words, and writes the config that vLLM and transformers read.",
        ),
        Stop(
            "compress/runtime/loader.py",
            "load_model",
            "Takes the weights of the artifact layer by layer, fuses the linears of a group, and has each "
            "repacked once.",
        ),
        Stop(
            "compress/kernels/linear/w4a16.py",
            "repack",
            "Brings four-bit codes and scales into the layout that its kernel reads.",
        ),
        Stop(
            "compress/runtime/fused_linear.py",
            "FusedLinear",
            "Holds the weights in that layout and multiplies with them, by the kernel that "
            "kernels/select.py chose.",
        ),
    ),
)
BATCH = Journey(
    "batch",
    "A calibration batch, from text to a compressed layer",
    (
        Stop(
            "compress/stages/calibrate.py",
            "calibrate",
            "The stage: asks for the tokens and writes them as an artifact.",
        ),
        Stop(
            "compress/data/model_tokens.py",
            "read_tokens",
            "Opens the data card (data/card.py), draws documents and encodes them with the model's "
            "tokenizer.",
        ),
        Stop(
            "compress/data/tokens.py",
            "TokenSet",
            "Holds the samples as token ids [N, S].",
        ),
        Stop(
            "compress/stages/quantize/layers.py",
            "quantize_layers",
            "The next stage: reads the token set and starts the runner.",
        ),
        Stop(
            "compress/calibrate/sequential.py",
            "run_sequential",
            "Embeds the samples, then takes them through the model, one layer at a time (layer_run.py "
            "holds them).",
        ),
        Stop(
            "compress/calibrate/at_once.py",
            "compress_at_once",
            "Has the layer observed, then applies the passes. With several ranks, ranks/ sends sums and "
            "results.",
        ),
        Stop(
            "compress/calibrate/observe.py",
            "observe",
            "Runs all samples through the layer (models/decoder.py) and updates the statistics of each tap, "
            "shard by shard.",
        ),
        Stop(
            "compress/calibrate/stats.py",
            "SecondMoment",
            "Sums E[x x^T] in a fixed order; MergeTree joins the shards.",
        ),
        Stop(
            "compress/calibrate/layer_state.py",
            "LayerState",
            "Holds the layer's weights, in the dtype they were loaded in and read as float32, and the "
            "statistics.",
        ),
        Stop(
            "compress/methods/quantize/passes.py",
            "SmoothPass",
            "Gives the statistics of each group to the smoother.",
        ),
        Stop(
            "compress/methods/quantize/awq.py",
            "Awq",
            "Reads the statistics, and proposes a scale for each channel.",
        ),
        Stop(
            "compress/models/surgery.py",
            "fold_",
            "Folds that scale into the weights; the compressed layer then feeds the next one with the same "
            "samples.",
        ),
    ),
)
REQUEST = Journey(
    "request",
    "A request, from text to text",
    (
        Stop(
            "compress/llm.py",
            "LLM",
            "Encodes the prompt, adds a request, steps the engine, decodes its tokens.",
        ),
        Stop(
            "compress/runtime/engine.py",
            "Engine",
            "One step: schedule, launch, read.",
        ),
        Stop(
            "compress/runtime/scheduler.py",
            "Scheduler",
            "Admits requests while blocks last, and fills a step: decodes first, then chunks of prompts.",
        ),
        Stop(
            "compress/runtime/prefill.py",
            "Prefill",
            "Takes the chunks of prompts of a step through the model.",
        ),
        Stop(
            "compress/runtime/model_runner.py",
            "ModelRunner",
            "Computes the serving forward over the rows of a step.",
        ),
        Stop(
            "compress/runtime/layer_runner.py",
            "LayerRunner",
            "Computes one layer: norm, qkv, rotation, store and paged attention "
            "(layer_attention.py), o, gated FFN.",
        ),
        Stop(
            "compress/runtime/fused_linear.py",
            "FusedLinear",
            "Multiplies with the weights of a linear group, by the kernel that kernels/select.py chose.",
        ),
        Stop(
            "compress/runtime/sampler.py",
            "sample",
            "Chooses the first token, by seed and position; decode steps call sample_rows of the same file.",
        ),
        Stop(
            "compress/runtime/step_queue.py",
            "StepQueue",
            "Launches steps, one before the last is read where that is possible.",
        ),
        Stop(
            "compress/runtime/decode.py",
            "PlainDecoding",
            "Keeps the rows of a decode step on the device and launches the step as a CUDA graph.",
        ),
        Stop(
            "compress/kernels/attention_decode/hopper.py",
            "attention_decode",
            "Reads keys and values through the block table, on an H200; on a CPU chunks.py beside it does.",
        ),
        Stop(
            "compress/runtime/request.py",
            "Finished",
            "The tokens of the request, and when each of them came.",
        ),
    ),
)
JOURNEYS = (WEIGHT, BATCH, REQUEST)
