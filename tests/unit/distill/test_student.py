"""Students of their own shape and LoRA: whole teachers and functions as they were, choices that are even,
merges that change nothing.
"""

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from compress.distill.lora import LoraLinear, add_lora_, merge_lora_
from compress.distill.objective import checkpoint_layers_
from compress.distill.student import Shape, evenly, sliced_decoder, student_arch
from compress.errors import UsageError
from compress.models.arch import Arch
from compress.models.checkpoint import Checkpoint
from compress.models.checkpoint_writer import write_checkpoint
from compress.models.decoder import Decoder
from compress.models.family import family_of
from compress.models.weights import MemorySource, build_decoder
from compress.stages.prune.spec import Prune
from tests.golden.test_known_configs import ROWS
from tests.support.tiny_decoder import LLAMA, QWEN3, tiny_arch, tiny_decoder, tiny_source

TOKENS = torch.arange(24).view(2, 12)


@given(num_all=st.integers(1, 200), data=st.data())
def test_an_even_choice_keeps_first_and_last_and_no_two_alike(num_all: int, data: st.DataObject) -> None:
    num_kept = data.draw(st.integers(1, num_all))
    kept = evenly(num_kept, num_all)
    assert len(set(kept)) == num_kept
    assert kept == sorted(kept)
    assert kept[0] == 0
    assert num_kept == 1 or kept[-1] == num_all - 1
    gaps = [after - before for before, after in zip(kept, kept[1:], strict=False)]
    assert not gaps or max(gaps) - min(gaps) <= 1


@pytest.mark.parametrize("config", [QWEN3, LLAMA])
def test_a_student_of_the_teachers_shape_is_the_teacher(config: dict[str, object]) -> None:
    source = tiny_source(tiny_arch(config))
    arch = student_arch(source.arch, Shape(layers=3, hidden=32, ffn=48, heads=4, kv_heads=2))
    assert torch.equal(
        sliced_decoder(source, arch)(TOKENS),
        build_decoder(source, dtype=torch.float32, device=torch.device("cpu"))(TOKENS),
    )


def test_channels_that_are_zero_in_the_teacher_are_left_out_without_a_change() -> None:
    """All but the evenly chosen FFN channels and KV groups give nothing, so the student computes what the
    teacher does.
    """
    teacher = tiny_decoder(tiny_arch(QWEN3, num_attention_heads=6, num_key_value_heads=3))
    kept, heads = evenly(20, 48), [0, 1, 4, 5]  # KV groups 0 and 2 of three, two heads each
    with torch.no_grad():
        for layer in teacher.layers:
            dead = torch.ones(48, dtype=torch.bool)
            dead[kept] = False
            layer.ffn.down.weight[:, dead] = 0.0
            dead = torch.ones(6, dtype=torch.bool)
            dead[heads] = False
            layer.attn.o.weight[:, dead.repeat_interleave(8)] = 0.0
    arch = student_arch(teacher.arch, Shape(ffn=20, heads=4, kv_heads=2))
    student = sliced_decoder(MemorySource(teacher, dtype=torch.float32), arch)
    assert torch.allclose(student(TOKENS), teacher(TOKENS), rtol=1e-4, atol=1e-5)


def test_a_student_is_a_model_that_others_load(tmp_path: Path) -> None:
    source = tiny_source(tiny_arch(LLAMA))
    arch = student_arch(source.arch, Shape(layers=2, hidden=16, ffn=32, heads=2, kv_heads=1))
    student = sliced_decoder(source, arch)
    write_checkpoint(tmp_path, MemorySource(student, dtype=torch.float32))
    again = Checkpoint(tmp_path)
    assert again.arch.layers == arch.layers
    assert again.arch.hidden_size == 16
    assert torch.equal(
        build_decoder(again, dtype=torch.float32, device=torch.device("cpu"))(TOKENS), student(TOKENS)
    )


def test_windows_of_the_chosen_layers_are_said_in_the_config() -> None:
    types = ["sliding_attention", "full_attention", "full_attention"]
    arch = tiny_arch(QWEN3, sliding_window=8, use_sliding_window=True, layer_types=types)
    student = student_arch(arch, Shape(layers=2))
    assert [layer.window for layer in student.layers] == [8, None]
    assert student.config["layer_types"] == ["sliding_attention", "full_attention"]


@pytest.mark.parametrize(
    "shape", [Shape(layers=4), Shape(hidden=64), Shape(heads=3, kv_heads=2), Shape(heads=4, kv_heads=1)]
)
def test_a_shape_that_cannot_be_cut_is_refused(shape: Shape) -> None:
    with pytest.raises(UsageError, match="student:"):
        student_arch(tiny_arch(), shape)


def trained(decoder: Decoder) -> Decoder:
    """With terms that are no longer zero."""
    for idx, module in enumerate(each for each in decoder.modules() if isinstance(each, LoraLinear)):
        torch.nn.init.normal_(module.b, std=0.05, generator=torch.Generator().manual_seed(idx))
    return decoder


def test_lora_starts_at_the_model_trains_its_terms_alone_and_merges_into_what_it_computed() -> None:
    decoder = tiny_decoder(tiny_arch())
    plain = tiny_decoder(tiny_arch())
    add_lora_(decoder, 4, alpha=8.0, generator=torch.Generator().manual_seed(0))
    assert torch.equal(decoder(TOKENS), plain(TOKENS))
    names = {name for name, parameter in decoder.named_parameters() if parameter.requires_grad}
    assert {name.rpartition(".")[2] for name in names} == {"a", "b"}
    assert len(names) == 2 * 7 * 3
    with_terms = trained(decoder)(TOKENS)
    assert not torch.allclose(with_terms, plain(TOKENS), atol=1e-3)
    merge_lora_(decoder)
    assert torch.allclose(decoder(TOKENS), with_terms, rtol=1e-4, atol=1e-5)
    assert {name for name, _ in decoder.named_parameters()} == {name for name, _ in plain.named_parameters()}


def test_layers_that_run_again_give_the_same_gradients() -> None:
    gradients = []
    for again in (False, True):
        decoder = tiny_decoder(tiny_arch()).requires_grad_(True)
        if again:
            checkpoint_layers_(decoder)
        decoder(TOKENS).square().mean().backward()
        gradients.append({name: parameter.grad for name, parameter in decoder.named_parameters()})
    for name, gradient in gradients[0].items():
        assert gradient is not None
        other = gradients[1][name]
        assert other is not None
        assert torch.allclose(gradient, other, rtol=1e-5, atol=1e-7), name


@pytest.mark.parametrize(
    ("name", "advice"),
    [
        ("state-spaces/mamba-2.8b-hf", "remove layers by"),
        ("tiiuae/falcon-mamba-7b", "remove layers by"),
        ("tiiuae/Falcon-H1-34B-Instruct", "remove heads, layers or channels of the FFN by"),
        ("ai21labs/AI21-Jamba-Reasoning-3B", "remove layers or channels of the FFN by"),
        ("MiniMaxAI/MiniMax-Text-01-hf", "remove experts by"),
        ("google/gemma-3n-E4B-it", "nothing of it is removed by"),
        ("mistralai/Mixtral-8x7B-v0.1", "remove experts, heads or layers by"),
    ],
)
def test_the_advice_names_what_prune_removes_of_a_model_from_which_no_student_is_cut(
    name: str, advice: str
) -> None:
    config = ROWS[name]["config"]
    arch = family_of(config).read_config(config)
    with pytest.raises(UsageError, match="no student is cut") as refused:
        student_arch(arch, Shape(layers=2))
    assert advice in str(refused.value)
    axes = {"experts": "experts", "heads": "heads", "layers": "depth", "channels": "ffn"}
    assert {axis for word, axis in axes.items() if word in advice} == {
        axis for axis in axes.values() if is_pruned(axis, arch)
    }


def is_pruned(axis: str, arch: Arch) -> bool:
    try:
        Prune.model_validate({axis: {"keep": 0.75}}).check_model(arch)
    except UsageError:
        return False
    return True
