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
            "compress/models/family.py",
            "Family",
            "Maps config fields and tensor names of a family to the canonical decoder, and refuses unknown ones.",
        ),
        Stop(
            "compress/models/checkpoint.py",
            "Checkpoint",
            "Reads the safetensors one layer at a time, under canonical names such as layers.3.attn.q.weight.",
        ),
        Stop(
            "compress/stages/quantize/layers.py",
            "quantize_layers",
            "Decides the scheme of each linear and the passes over a layer.",
        ),
        Stop(
            "compress/calibrate/sequential.py",
            "run_sequential",
            "Puts one layer on the device, observes it, applies the passes, stores the layer as a resume point.",
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
        Stop("compress/quant/packing.py", "pack", "Packs eight 4-bit codes into one 32-bit word."),
        Stop(
            "compress/export/compressed_tensors.py",
            "CompressedTensors",
            "Names the packed tensors, and writes the config that vLLM and transformers read.",
        ),
        Stop(
            "compress/artifact/workspace.py",
            "Workspace",
            "Takes the digest of every tensor, and gives the finished directory its name by one rename.",
        ),
        Stop(
            "compress/runtime/loader.py",
            "load_model",
            "Reads the artifact, and fuses the linears of a group.",
        ),
        Stop(
            "compress/kernels/select.py",
            "select",
            "Chooses the kernel for each linear; every other candidate states why it refuses.",
        ),
        Stop(
            "compress/runtime/fused_linear.py",
            "FusedLinear",
            "Holds the weights in the layout of that kernel, repacked once, and multiplies with them.",
        ),
    ),
)
BATCH = Journey(
    "batch",
    "A calibration batch, from text to statistics",
    (
        Stop(
            "compress/data/card.py", "load_card", "Reads a data card: where text is, its source and license."
        ),
        Stop(
            "compress/data/model_tokens.py",
            "read_tokens",
            "Draws documents of the card and encodes them with the model's tokenizer.",
        ),
        Stop(
            "compress/data/tokens.py",
            "TokenSet",
            "Holds the samples as token ids [N, S]; the calibrate stage stores it as an artifact.",
        ),
        Stop(
            "compress/calibrate/sequential.py",
            "run_sequential",
            "Embeds this rank's samples, then takes them through the model, one layer at a time.",
        ),
        Stop(
            "compress/calibrate/layer_run.py",
            "LayerRun",
            "Holds what the runner passes along: samples, shards, ranks, memory guard and dtype.",
        ),
        Stop(
            "compress/models/decoder.py",
            "DecoderLayer",
            "Computes the layer, and calls a tap with the input of each linear group.",
        ),
        Stop(
            "compress/calibrate/observe.py",
            "observe",
            "Runs all samples through the layer and updates the statistics of each tap, shard by shard.",
        ),
        Stop(
            "compress/calibrate/stats.py",
            "SecondMoment",
            "Sums E[x x^T] in a fixed order; MergeTree joins the shards.",
        ),
        Stop(
            "compress/ranks.py",
            "TorchRanks",
            "Sends partial sums to the rank that compresses the group, and codes to all.",
        ),
        Stop(
            "compress/calibrate/layer_state.py",
            "LayerState",
            "Holds the layer's float32 weights and the statistics that its passes read.",
        ),
        Stop(
            "compress/methods/quantize/awq.py",
            "Awq",
            "Reads the statistics, and proposes a scale for each channel.",
        ),
        Stop(
            "compress/models/surgery.py",
            "fold_",
            "Folds that scale into the weights; the compressed layer then feeds the next one with the same samples.",
        ),
    ),
)
REQUEST = Journey(
    "request",
    "A request, from text to text",
    (
        Stop("compress/api.py", "load", "Opens the model and builds the engine."),
        Stop(
            "compress/llm.py",
            "LLM",
            "Encodes the prompt, adds a request, steps the engine, decodes its tokens.",
        ),
        Stop("compress/runtime/engine.py", "Engine", "One step: schedule, launch, read."),
        Stop(
            "compress/runtime/scheduler.py",
            "Scheduler",
            "Admits requests while blocks last, and fills a step: decodes first, then chunks of prompts.",
        ),
        Stop(
            "compress/runtime/kv_cache.py",
            "KVCache",
            "Holds the pages of keys and values, and the free blocks.",
        ),
        Stop(
            "compress/runtime/model_runner.py",
            "ModelRunner",
            "Computes the serving forward over the rows of a step.",
        ),
        Stop(
            "compress/runtime/layer_runner.py",
            "LayerRunner",
            "Computes one layer: norm, qkv, rotation and store, paged attention, o, gated FFN.",
        ),
        Stop(
            "compress/kernels/attention_decode/paged.py",
            "attention_decode",
            "Reads keys and values through the block table.",
        ),
        Stop(
            "compress/runtime/sampler.py",
            "sample",
            "Chooses the next token of each row, by seed and position.",
        ),
        Stop(
            "compress/runtime/decode.py",
            "PlainDecoding",
            "Keeps the rows of a decode step on the device and replays the step as a CUDA graph.",
        ),
        Stop(
            "compress/runtime/speculative/verify.py",
            "Verifier",
            "With a proposer instead: verifies its draft tokens in one step and keeps those the model would choose.",
        ),
        Stop(
            "compress/runtime/request.py",
            "Finished",
            "The tokens of the request, and when each of them came.",
        ),
    ),
)
JOURNEYS = (WEIGHT, BATCH, REQUEST)
