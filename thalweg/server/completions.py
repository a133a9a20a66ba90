"""POST /v1/completions."""

from __future__ import annotations

from functools import partial

from starlette.requests import Request
from starlette.responses import Response

from thalweg.core.errors import InvalidRequest
from thalweg.engine.streams import Piece
from thalweg.server.context import AppContext
from thalweg.server.generation import PromptJob, asked_tokens, check_fits, make_job, read_prompts, read_truncation
from thalweg.server.logprobs import CompletionLogprobs, CompletionLogprobsBuilder, prompt_scores
from thalweg.server.openai_stream import ChoiceEncoder, OpenAIStreamEncoder, PromptChoice
from thalweg.server.parsing import given, listed_ids, sampling_params
from thalweg.server.protocol import CompletionRequest, Prompt
from thalweg.server.stream import respond
from thalweg.server.structured_output import grammar_of, limited_thought, with_budget
from thalweg.text.tokenizer import Tokenizer

DEFAULT_MAX_TOKENS = 16  # OpenAI's, for this route only
FIM_BEGIN, FIM_HOLE, FIM_END = "<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"


class CompletionChoice(PromptChoice, kw_only=True):
    text: str
    logprobs: CompletionLogprobs | None = None


async def completions(ctx: AppContext, request: Request, body: CompletionRequest) -> Response:
    model = ctx.model(body.model)
    if body.best_of is not None and body.best_of not in (1, body.n):
        raise InvalidRequest("best_of", f"is not supported here beyond n: leave it out, got {body.best_of}")
    echoed = body.logprobs if body.echo else None
    if body.echo and body.logprob_token_ids:
        raise InvalidRequest("logprob_token_ids", "does not go with echo: only tokens of the output are scored so")
    params = sampling_params(
        body,
        ctx.defaults,
        max_tokens=given(asked_tokens(body)[1], DEFAULT_MAX_TOKENS),
        min_tokens=given(body.min_tokens, 0),
        include_stop_str_in_output=bool(body.include_stop_str_in_output),
        logprobs=body.logprobs,
        logprob_token_ids=listed_ids(body),
        prompt_logprobs=max((top for top in (body.prompt_logprobs, echoed) if top is not None), default=None),
    )
    grammar = grammar_of(body, body.response_format, any_whitespace=ctx.any_whitespace)
    limit = partial(limited_thought, ctx.front.tokenizer, with_budget(grammar, body.thinking_token_budget))
    prompt, add_special = _infill_prompt(body, ctx.front.tokenizer), body.add_special_tokens is not False
    prompts = await read_prompts(ctx, "prompt", prompt, add_special, read_truncation(ctx, body))
    rid = ctx.rid(body.rid, request)
    jobs = [PromptJob(*prompt, params, rid, limit(prompt.ids)) for prompt in prompts]
    check_fits(ctx, jobs, body)
    job = await make_job(ctx, request, jobs, body.priority, body.cache_salt)
    choices = [CompletionChoiceEncoder(ctx.front.tokenizer, body, i, jobs[i // params.n]) for i in range(job.choices)]
    adds_usage = ctx.options.enable_force_include_usage
    encoder = OpenAIStreamEncoder(f"cmpl-{rid}", "text_completion", model, body, job, choices, adds_usage)
    return await respond(ctx, request, job, encoder, body.stream)


def _infill_prompt(body: CompletionRequest, tokenizer: Tokenizer) -> Prompt:
    """The prompt; with a suffix, DeepSeek's fill-in-the-middle prompt. Raises InvalidRequest."""
    if not body.suffix:
        return body.prompt
    if missing := [mark for mark in (FIM_BEGIN, FIM_HOLE, FIM_END) if tokenizer.mark_id(mark) is None]:
        raise InvalidRequest("suffix", f"is not supported by this model: its tokenizer has no {', '.join(missing)}")
    if body.echo:
        raise InvalidRequest("echo", "does not go with suffix: the model reads them in another order")
    prompts = [body.prompt] if isinstance(body.prompt, str) else body.prompt
    if not all(isinstance(text, str) for text in prompts):
        raise InvalidRequest("suffix", "needs a prompt of text, not of token ids")
    return [f"{FIM_BEGIN}{text}{FIM_HOLE}{body.suffix}{FIM_END}" for text in prompts]


class CompletionChoiceEncoder(ChoiceEncoder[CompletionRequest]):
    def __init__(self, tokenizer: Tokenizer, body: CompletionRequest, index: int, prompt: PromptJob) -> None:
        super().__init__(tokenizer, body, index, prompt)
        self._logprobs = None
        if body.logprobs is not None:
            top = len(body.logprob_token_ids or ()) or body.logprobs
            self._logprobs = CompletionLogprobsBuilder(self.names, top)
        self._hidden = frozenset() if body.skip_special_tokens is False else tokenizer.special_ids

    def feed(self, piece: Piece) -> list[CompletionChoice]:
        choice = self.whole(piece)
        has_news = choice.text or choice.token_ids or choice.prompt_logprobs or choice.logprobs is not None
        return [choice] if has_news or piece.finish is not None else []

    def whole(self, piece: Piece) -> CompletionChoice:
        echoes = self.first and bool(self.body.echo)
        choice = CompletionChoice(index=self.index, text=piece.text)
        if self._logprobs is not None:
            choice.logprobs = self._scored(self._logprobs, piece, echoes)
        if echoes:
            text = self.prompt.text
            text = self.tokenizer.decode(self.prompt.ids, skip_special_tokens=False) if text is None else text
            choice.text = text + choice.text
        self.fill(choice, choice, piece)
        return choice

    def _scored(self, builder: CompletionLogprobsBuilder, piece: Piece, echoes: bool) -> CompletionLogprobs:
        """The log-probabilities of a piece, behind those of the echoed prompt.

        A BOS that the tokenizer has added is not in the text.
        """
        shown = [token not in self._hidden for token in piece.ids]
        if not echoes:
            return builder.feed(piece.ids, piece.logprobs, shown)
        _, ids, text, *_ = self.prompt
        has_begin = text is None or text.startswith(self.tokenizer.token_bytes(ids[0]).decode(errors="replace"))
        scores = [*prompt_scores(ids, piece.prompt_logprobs), *piece.logprobs]
        return builder.feed([*ids, *piece.ids], scores, [has_begin, *[True] * (len(ids) - 1), *shown])
