"""Trains the bundled model's tokenizer: byte-level BPE with DeepSeek-V3's special tokens, every digit a token of its
own.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

BOS, EOS, PAD = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜▁pad▁｜>"
THINK, END_THINK = "<think>", "</think>"
USER, ASSISTANT = "<｜User｜>", "<｜Assistant｜>"

# In the order of the published vocabulary, where they also come after all merges. Not "special": text that is decoded
# with the special tokens skipped must still show thinking and tool calls to the parsers.
_MARKUP = (
    *(THINK, END_THINK, "<｜fim▁hole｜>", "<｜fim▁begin｜>", "<｜fim▁end｜>", USER, ASSISTANT, "<|EOT|>"),
    *("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"),
    *("<｜tool▁outputs▁begin｜>", "<｜tool▁outputs▁end｜>", "<｜tool▁output▁begin｜>", "<｜tool▁output▁end｜>"),
    *("<｜tool▁sep｜>", "｜DSML｜"),
)

_WORDS = r" ?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """A tokenizer of exactly `vocab_size` entries, special tokens included."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\p{N}"), behavior="isolated"),
            pre_tokenizers.Split(Regex(_WORDS), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - len(_MARKUP),
        special_tokens=[BOS, EOS, PAD],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator((text for text in texts), trainer)
    tokenizer.add_tokens([AddedToken(token, normalized=False, special=False) for token in _MARKUP])
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A {BOS} $B", special_tokens=[(BOS, tokenizer.token_to_id(BOS))]
    )
    if tokenizer.get_vocab_size() != vocab_size:
        raise ValueError(f"the text yields {tokenizer.get_vocab_size()} tokens, not {vocab_size}: give more text")
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, folder: Path, max_length: int) -> None:
    """Write `tokenizer.json` and `tokenizer_config.json`."""
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "add_bos_token": True,
        "add_eos_token": False,
        "bos_token": BOS,
        "clean_up_tokenization_spaces": False,
        "eos_token": EOS,
        "model_max_length": max_length,
        "pad_token": EOS,
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": None,
    }
    (folder / "tokenizer_config.json").write_text(
        json.dumps(config, ensure_ascii=False, indent=2) + "\n", encoding="utf-8"
    )
