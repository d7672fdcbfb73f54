"""A small tokenizer trained on the environments' own words: byte-level BPE, so any text can be written, with chat markers and tags.

Every symbol of a grid and every digit is a token of its own (only words with lower-case letters are merged): a model this small
learns to read a board when a cell is a token.
"""

from collections.abc import Iterable

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from tether.core.grammar import ANSWER_CLOSE, ANSWER_OPEN, THINK_CLOSE, THINK_OPEN

VOCABULARY = 1024
WORD = r" ?[A-Za-z]?[a-z]+| ?\|\||\s|."
CHAT_START, CHAT_END = "<|im_start|>", "<|im_end|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def train_tokenizer(texts: Iterable[str]) -> PreTrainedTokenizerFast:
    """A tokenizer whose merges come from `texts`."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(WORD), behavior="isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    markers: list[str | AddedToken] = [AddedToken(text, special=True, normalized=False) for text in (CHAT_START, CHAT_END)]
    tags: list[str | AddedToken] = [
        AddedToken(text, special=False, normalized=False) for text in (THINK_OPEN, THINK_CLOSE, ANSWER_OPEN, ANSWER_CLOSE)
    ]
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[*markers, *tags],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=CHAT_END,
        pad_token=CHAT_END,
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        model_max_length=1024,
    )
