"""xIELU is what `transformers` computes; its parameters are read, written, trained and kept; what cannot have
them is refused.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers.activations
from safetensors.torch import load_file, save_file
from torch import Tensor

from compress.distill.losses import next_token
from compress.distill.train import TokenStream, TrainConfig, train
from compress.errors import UnsupportedArch, UnsupportedFormat
from compress.export import FORMATS, Rule
from compress.export.onnx import Onnx
from compress.models.arch import Arch
from compress.models.checkpoint import Checkpoint
from compress.models.checkpoint_writer import write_checkpoint
from compress.models.decoder import DecoderLayer
from compress.models.experts import Experts
from compress.models.family import family_of
from compress.models.pruning import keep_channels_
from compress.models.tap import no_tap
from compress.models.weights import MemorySource, build_decoder, dense
from compress.models.xielu import PARAMETERS, initial_parameters, xielu, xielu_numbers
from tests.support.tiny_decoder import tiny_arch, tiny_checkpoint, tiny_decoder, tiny_tokens
from tests.support.tiny_source import LIKE_GEMMA4_E, tiny_shape, tiny_source

CPU = torch.device("cpu")
APERTUS: dict[str, Any] = {
    "model_type": "apertus",
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "dtype": "float32",
}
UNGATED = {"activation": "xielu", "layers": (tiny_shape(gated=False),) * 2}


def theirs(alpha_p: float, alpha_n: float, dtype: torch.dtype) -> Any:
    return transformers.activations.XIELUActivation(alpha_p, alpha_n, dtype=dtype)


def inputs(dtype: torch.dtype) -> Tensor:
    ordinary = 4 * torch.randn(5, 83, generator=torch.Generator().manual_seed(0))
    small = torch.logspace(-8, 2, 83)
    edges = torch.tensor([0.0, -0.0, -1e-6, 1e-6, -2e-6, float("nan")])
    return torch.cat((ordinary.flatten(), small, -small, edges)).to(dtype)


def assert_same(actual: Tensor, expected: Tensor, *, rtol: float = 0, atol: float = 0) -> None:
    torch.testing.assert_close(actual, expected, rtol=rtol, atol=atol, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("alpha_p", "alpha_n"), [(0.8, 0.8), (2.5, 0.6), (1e-3, 7.0)])
def test_xielu_is_that_of_transformers_bit_for_bit_with_its_gradients(
    alpha_p: float, alpha_n: float, dtype: torch.dtype
) -> None:
    module = theirs(alpha_p, alpha_n, dtype)
    numbers = [module.alpha_p, module.alpha_n, module.beta, module.eps]
    ours = [each.detach().clone().requires_grad_() for each in numbers[:2]]
    x = inputs(dtype)[:-1].requires_grad_()
    y = xielu(x, xielu_numbers(*ours, *numbers[2:]))
    expected = module._xielu_python(x)
    assert torch.equal(y, expected)
    weight = torch.randn(y.shape, generator=torch.Generator().manual_seed(1), dtype=dtype)
    of_ours = torch.autograd.grad((y * weight).sum(), (x, *ours))
    of_theirs = torch.autograd.grad((expected * weight).sum(), (x, module.alpha_p, module.alpha_n))
    eps = torch.finfo(dtype).eps
    for one, other in zip(of_ours, of_theirs, strict=True):
        assert float(one.abs().max()) > 0
        assert_same(one, other, rtol=64 * eps, atol=64 * eps * float(other.abs().max()))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_in_sixteen_bits_the_result_is_rounded_once(dtype: torch.dtype) -> None:
    """`transformers` rounds each of its steps to the dtype, and differs by some roundings of its largest
    terms."""
    module = theirs(0.8, 1.9, dtype)
    numbers_4 = xielu_numbers(module.alpha_p, module.alpha_n, module.beta, module.eps)
    assert numbers_4.dtype == torch.float32
    x = inputs(dtype)
    y = xielu(x, numbers_4)
    assert y.dtype == dtype
    in_float32 = xielu(x.float(), numbers_4)
    assert_same(y, in_float32.to(dtype))
    with torch.no_grad():
        rounded = module._xielu_python(x)
    assert not torch.equal(y[:-1], rounded[:-1])
    terms = 1.9 * x.float().abs().clamp(min=1e-6) + 0.8 * x.float().clamp(min=0) ** 2
    distance = (y.float() - rounded.float()).abs()
    finite = in_float32.abs() < 6e4
    assert bool((distance <= 6 * torch.finfo(dtype).eps * terms + 2**-22)[finite].all())


def test_the_first_parameters_are_those_of_transformers() -> None:
    module = theirs(0.8, 0.8, torch.float32)
    for name, value in initial_parameters().items():
        their = getattr(module, name)
        assert their.shape == value.shape
        assert_same(value, their.detach(), rtol=1e-6)


def read(changes: Mapping[str, Any]) -> Arch:
    config = {**APERTUS, **changes}
    return family_of(config).read_config(config)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"mlp_bias": True}, "mlp_bias = true"),
        ({"post_norm": True}, "post_norm = true"),
        ({"qk_norm": False}, "qk_norm = false"),
        ({"hidden_act": "silu"}, "the FFN has no gate and the activation 'silu'"),
        ({"model_type": "llama"}, "hidden_act = .*xielu.*without parameters in this family"),
        ({"model_type": "arcee"}, "hidden_act = .*xielu.*without parameters in this family"),
        (
            {
                "model_type": "nemotron_h",
                "hidden_act": None,
                "mlp_hidden_act": "xielu",
                "layers_block_type": ["mlp", "full_attention"],
            },
            "mlp_hidden_act = .*xielu.*without parameters in this family",
        ),
    ],
)
def test_what_no_apertus_computes_is_refused(changes: dict[str, Any], reason: str) -> None:
    assert read({}).activation == "xielu"
    with pytest.raises(UnsupportedArch, match=f"(?i){reason}"):
        read({"hidden_act": "xielu", **changes})


def test_the_squared_relu_in_its_place_has_no_parameters() -> None:
    arch = read({"hidden_act": "relu2"})
    names = dict(DecoderLayer(arch, 0).named_parameters())
    assert not [name for name in names if name.startswith("ffn.") and not name.endswith("weight")]
    assert arch.num_params == read({}).num_params - 2 * len(PARAMETERS)


def test_experts_and_gates_with_parameters_of_an_activation_are_refused() -> None:
    source = tiny_source(**UNGATED)
    sparse = (tiny_shape(gated=False), tiny_shape(gated=False, experts=Experts(4, 2, 24)))
    with pytest.raises(UnsupportedArch, match="layer 1: experts with the activation 'xielu', which has p"):
        source.arch.replace(layers=sparse)
    with pytest.raises(UnsupportedArch, match="layer 0: the FFN has a gate and the activation 'xielu'"):
        source.arch.replace(layers=(tiny_shape(),))


@pytest.mark.parametrize("activation", ["xielu", "relu2"])
def test_what_layers_read_of_embeddings_has_gates(activation: str) -> None:
    with pytest.raises(
        UnsupportedArch, match=f"embeddings for each layer and the activation is '{activation}"
    ):
        tiny_source(**{**LIKE_GEMMA4_E, "activation": activation, "layers": (tiny_shape(gated=False),)})


def tensors(directory: Path) -> dict[str, Tensor]:
    (file,) = directory.glob("*.safetensors")
    return load_file(file)


def stored(directory: Path, **changes: Tensor | None) -> Path:
    """Return a checkpoint whose first layer has these parameters of its activation."""
    tiny_checkpoint(directory, tiny_arch(APERTUS))
    found = tensors(directory)
    for name, value in changes.items():
        full = f"model.layers.0.mlp.act_fn.{name}"
        assert full in found
        del found[full]
        if value is not None:
            found[full] = value
    (file,) = directory.glob("*.safetensors")
    save_file(found, file, metadata={"format": "pt"})
    return directory


def logits(directory: Path) -> Tensor:
    source = Checkpoint(directory)
    decoder = build_decoder(source, dtype=torch.float32, device=CPU)
    with torch.no_grad():
        found: Tensor = decoder(tiny_tokens(source.arch, 2, 9).long())
    return found


@pytest.mark.parametrize("shape", [(), (1,)])
def test_numbers_that_no_training_changes_count_as_they_are_stored(
    shape: tuple[int, ...], tmp_path: Path
) -> None:
    """A checkpoint has them as [] or as [1], and gets them back so."""
    plain = stored(tmp_path / "plain")
    same = stored(tmp_path / "same", beta=torch.full(shape, 0.5), eps=torch.full(shape, -1e-6))
    other = stored(tmp_path / "other", beta=torch.full(shape, 0.75), eps=torch.full(shape, -0.5))
    assert torch.equal(logits(same), logits(plain))
    assert not torch.allclose(logits(other), logits(plain), atol=1e-3)
    (tmp_path / "written").mkdir()
    write_checkpoint(tmp_path / "written", Checkpoint(other))
    written = tensors(tmp_path / "written")
    assert written.keys() == tensors(other).keys()
    for name, value in tensors(other).items():
        assert written[name].shape == value.shape
        assert torch.equal(written[name], value)


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("alpha_p", None, r"lacks the tensor 'model\.layers\.0\.mlp\.act_fn\.alpha_p'"),
        ("eps", None, r"lacks the tensor 'model\.layers\.0\.mlp\.act_fn\.eps'"),
        ("beta", torch.tensor([0.5, 0.5]), r"act_fn\.beta' is \[2\], its config says \[\]"),
        ("beta", torch.tensor([[0.5]]), r"act_fn\.beta' is \[1, 1\], its config says \[\]"),
        ("alpha_n", torch.tensor([1.0, 2.0]), r"act_fn\.alpha_n' is \[2\], its config says \[1\]"),
    ],
)
def test_a_checkpoint_without_a_parameter_or_with_several_numbers_is_refused(
    name: str, value: Tensor | None, reason: str, tmp_path: Path
) -> None:
    with pytest.raises(UnsupportedArch, match=reason):
        Checkpoint(stored(tmp_path, **{name: value}))


def test_a_parameter_in_whole_numbers_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedFormat, match=r"act_fn\.eps' is I32"):
        Checkpoint(stored(tmp_path, eps=torch.tensor(0, dtype=torch.int32)))


def test_training_changes_what_is_learned_and_nothing_else(tmp_path: Path) -> None:
    arch = tiny_arch(APERTUS)
    decoder = tiny_decoder(arch).requires_grad_(True)
    before = {name: each.detach().clone() for name, each in decoder.named_parameters()}
    text = tiny_tokens(arch, 1, 600)[0]
    stream = TokenStream(text, seq_len=16, batch_size=4, seed=0)
    config = TrainConfig(8, 4, 2, peak_lr=1e-2, weight_decay=0.5, compute_dtype=torch.float32)
    list(train(decoder, next_token, stream.batch, config, device=CPU))
    moved = {name for name, each in decoder.named_parameters() if not torch.equal(each, before[name])}
    fixed = {f"layers.{idx}.ffn.{name}" for idx in range(2) for name in ("beta", "eps")}
    assert before.keys() - moved == fixed
    write_checkpoint(tmp_path, MemorySource(decoder, dtype=torch.float32))
    trained = decoder.get_parameter("layers.1.ffn.alpha_p")
    assert torch.equal(dense(Checkpoint(tmp_path).layer(1)["ffn.alpha_p"]), trained)


def test_up_is_scaled_by_no_smoothing_and_its_norm_is() -> None:
    decoder = tiny_decoder(tiny_arch(APERTUS))
    layer = decoder.layers[0]
    assert isinstance(layer, DecoderLayer)
    assert [(pair.producer, pair.linears) for pair in layer.smoothing_pairs()] == [
        ("attn_norm", ("attn.q", "attn.k", "attn.v")),
        ("attn.v", ("attn.o",)),
        ("ffn_norm", ("ffn.up",)),
    ]


def test_an_ffn_keeps_its_parameters_when_channels_go() -> None:
    source = tiny_source(**UNGATED)
    weights = {name: dense(each) for name, each in source.layer(0).items()}
    kept_F = torch.arange(88) % 3 > 0
    fewer = dict(weights)
    keep_channels_(fewer, kept_F)
    assert fewer.keys() == weights.keys()
    silent = {**weights, "ffn.down.weight": weights["ffn.down.weight"] * kept_F}
    shape = tiny_shape(gated=False, intermediate_size=int(kept_F.sum()))
    x_BSD = torch.randn(2, 5, 56, generator=torch.Generator().manual_seed(2))
    outputs = []
    for arch, state in ((source.arch, silent), (source.arch.replace(layers=(shape,)), fewer)):
        layer = DecoderLayer(arch, 0)
        layer.load_state_dict(state)
        with torch.no_grad():
            outputs.append(layer.ffn(x_BSD, no_tap))
    assert float(outputs[0].abs().max()) > 0
    assert_same(*outputs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["onnx", "onnx-float16"])
def test_a_graph_of_onnx_is_refused_with_the_reason(name: str) -> None:
    form = FORMATS.get(name)
    assert isinstance(form, Onnx)
    (rule,) = form.broken_facts(tiny_arch(APERTUS))
    assert rule == Rule("activation", "the activation xielu is not in the graph.")
