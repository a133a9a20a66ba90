"""The front of the simulation: what it asked for, what came back, and what should have."""

from __future__ import annotations

from dataclasses import dataclass, field

from tests.null.sim.model import EOS, chain, logprob, sample
from thalweg.core.messages import Submit, TokenDelta
from thalweg.core.plan import TokenLogprob


@dataclass(eq=False)
class Case:
    """One sequence, and its news. masked: under a grammar. send: its pages are copied away at the end. cut: the token
    at which the front stops it (a stop string), or -1. hurt: an abort was drawn for it, so any prefix of its tokens is
    right.
    """

    submit: Submit
    context: int
    masked: bool = False
    send: bool = False
    cut: int = -1
    hurt: bool = False
    next_turn: bool = False
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    deltas: list[TokenDelta] = field(default_factory=list)
    aborted: bool = False  # an abort was sent

    @property
    def finish(self) -> str:
        return self.deltas[-1].finish if self.deltas else ""

    @property
    def end(self) -> int:
        limit = self.submit.params.max_tokens
        return self.context if limit is None else min(len(self.submit.prompt) + limit, self.context)

    @property
    def stop_ids(self) -> tuple[int, ...]:
        params = self.submit.params
        return params.stop_token_ids + (() if params.ignore_eos else (EOS,))

    def hear(self, delta: TokenDelta) -> None:
        assert not self.finish, f"news of a sequence that has ended: {delta}"
        assert delta.tokens or delta.finish, f"empty news: {delta}"
        self.deltas.append(delta)
        self.tokens.extend(delta.tokens)
        self.logprobs.extend(delta.logprobs)

    # ---- the sequential decoder

    def sequential(self) -> list[int]:
        submit, out = self.submit, []
        params, size = submit.params, len(submit.prompt)
        while size + len(out) < self.end and not (out and out[-1] in self.stop_ids):
            known = (*submit.prompt, *out)
            banned = self.stop_ids if len(out) < params.min_tokens else ()
            out.append(
                sample(chain(submit.salt, known)[-1], params.seed or 0, known[-1] if self.masked else None, banned)
            )
        return out

    def check(self) -> None:
        want, got = self.sequential(), self.tokens
        cut = self.cut in got
        if cut:  # the front cuts; what the engine made beyond it does not exist
            want, got = want[: want.index(self.cut)] if self.cut in want else want, got[: got.index(self.cut)]
        whole = not self.hurt and not cut
        assert got == (want if not self.hurt else want[: len(got)]), f"wrong tokens: {self.submit}: {got}, not {want}"
        assert self.finish in (("stop", "length") if whole else ("stop", "length", "abort")), (
            f"never ended: {self.submit}"
        )
        if self.finish != "abort" and not cut:
            stopped = bool(want) and want[-1] in self.stop_ids
            assert (self.finish, self.deltas[-1].stop_id) == (("stop", want[-1]) if stopped else ("length", -1)), (
                "wrong finish"
            )
        self._check_logprobs(want)

    def _check_logprobs(self, want: list[int]) -> None:
        submit = self.submit
        hashes = chain(submit.salt, (*submit.prompt, *self.tokens))
        size, top = len(submit.prompt), submit.params.logprobs
        made = [] if top is None else [logprob(hashes[size - 1 + i], t, top) for i, t in enumerate(self.tokens)]
        assert self.logprobs == made, f"wrong logprobs: {submit}"
        first = self.deltas[0]
        assert not any(d.prompt_logprobs or d.cached for d in self.deltas[1:]), (
            "only the first news says what the prompt was"
        )
        top = submit.params.prompt_logprobs
        if first.finish == "abort" or top is None:
            assert not first.prompt_logprobs
        else:
            scores = tuple(logprob(hashes[q], submit.prompt[q + 1], top) for q in range(size - 1))
            assert first.prompt_logprobs == scores, f"wrong prompt logprobs: {submit}"
