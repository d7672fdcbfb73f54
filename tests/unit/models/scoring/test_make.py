"""A judge with another tokenizer scores the same text: what a person would get by decoding and encoding by hand."""

from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from tether.core.errors import BadInput
from tether.models.scoring.local import PrefixScorer
from tether.models.scoring.make import RetokenizedScorer, same_tokens


@pytest.fixture
def letters() -> Any:
    """A tokenizer with one token for each printable ASCII character and the line break (which byte-level files write as Ċ), and no more."""
    alphabet = [chr(code) for code in range(ord("!"), ord("~") + 1)] + ["Ġ", "Ċ"]
    words = Tokenizer(models.BPE(vocab={letter: number for number, letter in enumerate(alphabet)}, merges=[], unk_token=None))
    words.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    words.decoder = decoders.ByteLevel()
    words.post_processor = processors.TemplateProcessing(single="! $A", special_tokens=[("!", 0)])  # begins every text, unless told not to
    return PreTrainedTokenizerFast(tokenizer_object=words)


class _Remembering:
    def __init__(self) -> None:
        self.seen: list[Any] = []

    def score_many(self, prompt: Any, reasonings: Any) -> Any:
        self.seen.append((prompt, reasonings))
        return [-1.5 * len(reasoning) for reasoning in reasonings]


PROMPT = "<|im_start|>user\nGo to G .<|im_end|>\n<think>"
REASONINGS = [" Up , then left.", "I am lost !"]


def test_the_same_text_in_other_tokens(tiny: Any, letters: Any) -> None:
    """Marks of the writer's template are text for the judge, and no space is tidied away."""
    judge = _Remembering()
    scorer = RetokenizedScorer(judge, tiny.tokenizer, letters)
    prompt, *reasonings = (tiny.tokenizer.encode(text, add_special_tokens=False) for text in (PROMPT, *REASONINGS))
    found = scorer.score_many(prompt, reasonings)
    ((read_prompt, read_reasonings),) = judge.seen
    assert letters.decode(read_prompt, clean_up_tokenization_spaces=False) == PROMPT and len(read_prompt) == len(PROMPT)
    assert [letters.decode(ids, clean_up_tokenization_spaces=False) for ids in read_reasonings] == REASONINGS
    assert found.tolist() == [-24.0, -16.5] and isinstance(found, np.ndarray)


def test_a_model_as_the_judge(tiny: Any, letters: Any, small_model: Any) -> None:
    """log p by hand: the sum over the letters of the reasoning after the letters of the prompt."""
    model = small_model("llama")
    prompt, reasoning = (tiny.tokenizer.encode(text, add_special_tokens=False) for text in (PROMPT, REASONINGS[0]))
    ids = [letters.encode(text, add_special_tokens=False) for text in (PROMPT, REASONINGS[0])]
    with torch.inference_mode():
        table = torch.log_softmax(model(input_ids=torch.tensor([ids[0] + ids[1]])).logits[0].double(), dim=-1)
    expected = sum(float(table[len(ids[0]) + place - 1, token]) for place, token in enumerate(ids[1]))
    found = RetokenizedScorer(PrefixScorer(model), tiny.tokenizer, letters).score_many(prompt, [reasoning])
    assert found == pytest.approx([expected], rel=1e-5)


def test_whether_tokens_are_the_same(tiny: Any, letters: Any) -> None:
    assert same_tokens(tiny.tokenizer, tiny.tokenizer) and not same_tokens(tiny.tokenizer, letters)


def test_text_that_the_judge_cannot_read(tiny: Any, letters: Any) -> None:
    """The judge has no letter for it."""
    scorer = RetokenizedScorer(_Remembering(), tiny.tokenizer, letters)
    accented = tiny.tokenizer.encode("é", add_special_tokens=False)
    with pytest.raises(BadInput, match=r"the scorer's tokenizer makes no tokens of 'é'; choose another diagnosis\.scorer"):
        scorer.score_many(tiny.tokenizer.encode("Up", add_special_tokens=False), [accented])
