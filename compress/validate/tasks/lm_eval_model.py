"""The bundled engine as a model of lm-eval (EleutherAI/lm-evaluation-harness): log probabilities of answers
and of whole texts, and generation with stop strings.

Texts are encoded, cut and continued as lm-eval's own `hf` backend does it; a test holds both to one
another, item by item. This file needs the extra `[eval]`, and nothing imports it before a task asks for it.
"""

from typing import Any

from lm_eval import utils
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import handle_stop_sequences, normalize_gen_kwargs

from compress.runtime.continuation_logprobs import score_continuations
from compress.runtime.request import SamplingParams
from compress.validate.tasks.text_model import TextModel

MAX_GENERATED = 256
"""Tokens of a generated answer where a task states no number, as lm-eval's own backends do."""


class EngineLM(TemplateLM):
    """A model with its tokenizer, as lm-eval calls it."""

    def __init__(self, model: TextModel) -> None:
        super().__init__()
        self._model = model
        self.tokenizer = None  # lm-eval would look for a chat template in it

    @property
    def eot_token_id(self) -> int:
        """The token that ends a text."""
        return min(self._model.engine.arch.eos_token_ids, default=self._model.first_id)

    @property
    def prefix_token_id(self) -> int:
        """The token before a text that has no context."""
        return self._model.first_id

    @property
    def max_length(self) -> int:
        """Tokens of the longest sequence."""
        return self._model.engine.max_model_len

    @property
    def tokenizer_name(self) -> str:
        """A name that differs where tokenizers do."""
        return self._model.tokenizer_digest.replace(":", "-")

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        """Return the ids of a text."""
        del kwargs
        return self._model.encode(string, add_bos=add_special_tokens is not False)

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        """Return the source of the model's chat template."""
        own = self._model.chat_template
        return own.source if own is not None and chat_template is not False else None

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """Return a conversation as the model's template writes it.

        Raises:
            UsageError: the model has no chat template.
        """
        return self._model.render(chat_history, add_generation_prompt=add_generation_prompt)

    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """Return the log probability of each answer, and whether greedy decoding gives it."""
        del disable_tqdm
        found: list[tuple[float, bool]] = super().loglikelihood(requests, disable_tqdm=True)
        return found

    def _loglikelihood_tokens(
        self, requests: list[tuple[tuple[str, str], list[int], list[int]]], **kwargs: Any
    ) -> list[tuple[float, bool]]:
        del kwargs
        pairs = [(context, continuation) for _, context, continuation in requests]
        return [(each.logprob, each.is_greedy) for each in score_continuations(self._model.engine, pairs)]

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """Return the log probability of each whole text, in windows of the longest sequence."""
        del disable_tqdm
        windows: list[tuple[int, tuple[list[int], list[int]]]] = []
        for idx, request in enumerate(requests):
            own = utils.get_rolling_token_windows(
                token_list=self.tok_encode(request.args[0]),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length,
                context_len=1,
            )
            windows += [(idx, utils.make_disjoint_window(each)) for each in own]
        totals = [0.0] * len(requests)
        scores = score_continuations(self._model.engine, [window for _, window in windows])
        for (idx, _), score in zip(windows, scores, strict=True):
            totals[idx] += score.logprob
        return totals

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Return one continuation a request, up to one of its stop strings."""
        del disable_tqdm
        end = self._model.decode([self.eot_token_id], skip_special_tokens=False)
        found = [""] * len(requests)
        groups: dict[tuple[str, ...], list[tuple[int, SamplingParams]]] = {}
        for idx, request in enumerate(requests):
            options = normalize_gen_kwargs(request.args[1], MAX_GENERATED)
            stop = tuple(each for each in handle_stop_sequences(list(options["until"]), eos=end) if each)
            groups.setdefault(stop, []).append((idx, _params(options)))
        for stop, own in groups.items():
            prompts = [requests[idx].args[0] for idx, _ in own]
            texts = self._model.generate(prompts, [params for _, params in own], stop=stop)
            for (idx, _), text in zip(own, texts, strict=True):
                found[idx] = text.text
        return found


def _params(options: dict[str, Any]) -> SamplingParams:
    """Return the sampling parameters that a request of lm-eval states."""
    draws = bool(options.get("do_sample"))
    return SamplingParams(
        max_tokens=int(options["max_gen_toks"]),
        temperature=float(options.get("temperature") or 0.0) if draws else 0.0,
        top_p=float(options.get("top_p") or 1.0) if draws else 1.0,
        top_k=int(options.get("top_k") or 0) if draws else 0,
    )
