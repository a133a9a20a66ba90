"""The tokenizer as Python code written for transformers' uses it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from thalweg.core.errors import InvalidRequest
from thalweg.llm.prompts import Message, TextFrontend


class ChatTokenizer:
    """Texts to token ids and back, and conversations to prompts."""

    def __init__(self, texts: TextFrontend) -> None:
        self._texts, self._tokenizer = texts, texts.tokenizer
        self.bos_token_id, self.eos_ids = self._tokenizer.bos_id, self._tokenizer.eos_ids
        self.bos_token, self.eos_token = map(self._tokenizer.special_tokens.get, ("bos_token", "eos_token"))
        self.vocab_size = self._tokenizer.vocab_size

    @property
    def eos_token_id(self) -> int | None:
        """The id of `eos_token`; `eos_ids` are all that end an answer."""
        return None if self.eos_token is None else self._tokenizer.token_id(self.eos_token)

    @property
    def all_special_ids(self) -> list[int]:
        return sorted(self._tokenizer.special_ids)

    def __len__(self) -> int:
        return self.vocab_size

    def __call__(self, text: str | Sequence[str], add_special_tokens: bool = True) -> dict[str, Any]:
        """`input_ids` and `attention_mask`, lists, of a text or of each of several. Raises InvalidRequest."""
        if not isinstance(text, str):
            each = [self(one, add_special_tokens) for one in text]
            return {name: [one[name] for one in each] for name in ("input_ids", "attention_mask")}
        ids = self.encode(text, add_special_tokens)
        return {"input_ids": ids, "attention_mask": [1] * len(ids)}

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids, with BOS if the model wants one. Raises InvalidRequest for invalid Unicode."""
        return self._tokenizer.encode(text, add_special_tokens)

    def decode(self, token_ids: int | Iterable[int], skip_special_tokens: bool = False) -> str:
        ids = [token_ids] if isinstance(token_ids, int) else token_ids
        return self._tokenizer.decode(ids, skip_special_tokens)

    def batch_decode(self, sequences: Iterable[Iterable[int]], skip_special_tokens: bool = False) -> list[str]:
        return [self.decode(ids, skip_special_tokens) for ids in sequences]

    def convert_tokens_to_ids(self, token: str) -> int | None:
        """The id of exactly this token, or None."""
        return self._tokenizer.token_id(token)

    def apply_chat_template(
        self,
        conversation: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        add_generation_prompt: bool = False,
        continue_final_message: bool = False,
        tokenize: bool = True,
        **template_kwargs: Any,
    ) -> str | list[int]:
        """The prompt of a conversation, as `LLM.chat` makes it: token ids, or with `tokenize=False` its text.

        template_kwargs: arguments of the template, such as `thinking`. Raises InvalidRequest naming message and field.
        """
        for name in ("return_tensors", "chat_template", "return_dict"):
            if template_kwargs.pop(name, None):
                raise InvalidRequest(name, "is not supported here: the result is a text or a list of token ids")
        options = template_kwargs, add_generation_prompt, continue_final_message
        prompt = self._texts.render(conversation, tools, *options)
        return list(prompt.ids) if tokenize else prompt.text or ""
