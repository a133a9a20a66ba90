"""`suffix` of /v1/completions: the model writes what stands between prompt and suffix (FIM, DeepSeek's
prefix-suffix-middle order).
"""

from __future__ import annotations

from thalweg.core.errors import InvalidRequest
from thalweg.server.protocol import CompletionRequest, Prompt
from thalweg.text.tokenizer import Tokenizer

BEGIN, HOLE, END = "<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"


def prompt_of(body: CompletionRequest, tokenizer: Tokenizer) -> Prompt:
    """The prompt, with the suffix around the hole where there is one. Raises InvalidRequest."""
    if not body.suffix:
        return body.prompt
    if lacking := [mark for mark in (BEGIN, HOLE, END) if tokenizer.mark_id(mark) is None]:
        raise InvalidRequest("suffix", f"is not what this model can do: its tokenizer has no {', '.join(lacking)}")
    if body.echo:
        raise InvalidRequest("echo", "does not go with suffix: the model reads them in another order")
    texts = [body.prompt] if isinstance(body.prompt, str) else [text for text in body.prompt if isinstance(text, str)]
    if len(texts) != (1 if isinstance(body.prompt, str) else len(body.prompt)):
        raise InvalidRequest("suffix", "needs a prompt of text, not of token ids")
    return [f"{BEGIN}{text}{HOLE}{body.suffix}{END}" for text in texts]
