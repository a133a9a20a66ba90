"""Offline use from Python: an engine in the calling thread."""

from __future__ import annotations

import contextlib
import itertools
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import FrameType
from typing import Any, Self

from rich.console import Console
from rich.progress import Progress, TextColumn

from thalweg.core.errors import EngineDead
from thalweg.core.grammar import NO_GRAMMAR, Grammar
from thalweg.core.messages import Control, DumpExperts, StartProfile, StopProfile, UpdateWeights
from thalweg.core.request import check_request
from thalweg.core.sampling import SamplingParams
from thalweg.engine.build import BAR_COLUMNS
from thalweg.engine.local import LocalEngine
from thalweg.engine.streams import Assembler, Piece
from thalweg.llm.outputs import OutputBuilder, RequestOutput
from thalweg.llm.prompts import (
    Conversations,
    GrammarOfEach,
    ParamsOfEach,
    PreparedRequest,
    Prompts,
    TextFrontend,
    TokenizedPrompt,
    conversations,
)
from thalweg.llm.tokenizer import ChatTokenizer
from thalweg.text.chat import with_thinking


class GenerationInterrupted(KeyboardInterrupt):
    """Ctrl-C ended a call between two steps. The engine can be used again.

    outputs: one result a prompt; what had not ended has the finish reason "abort".
    """

    def __init__(self, outputs: list[RequestOutput]) -> None:
        ended = sum(output.outputs[0].finish_reason != "abort" for output in outputs)
        super().__init__(f"{ended} of {len(outputs)} prompts were done; all results so far are in `outputs`")
        self.outputs = outputs


class LLM:
    """An engine in the calling thread, to complete many prompts: `with LLM("models/tiny") as llm: llm.generate(…)`.

    model: a folder, or org/name on the hub; None: the one that comes with Thalweg. use_tqdm_on_load: shows the loading
    on a terminal. config: the flags of `thalweg serve` by name, also as vLLM and SGLang spell them. Raises
    UnsupportedConfig and CheckpointError.
    """

    def __init__(self, model: str | None = None, *, use_tqdm_on_load: bool = True, **config: Any) -> None:
        self.texts = TextFrontend(model, config, use_tqdm_on_load and sys.stderr.isatty())
        self.engine = LocalEngine(self.texts.resolved.engine)
        self._ids, self._is_shut_down = itertools.count(), False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.shutdown()

    def generate(
        self,
        prompts: Prompts,
        sampling_params: ParamsOfEach = None,
        use_tqdm: bool = True,
        *,
        priority: int | Sequence[int] | None = None,
        grammar: GrammarOfEach = NO_GRAMMAR,
    ) -> list[RequestOutput]:
        """Completes each prompt. Results are in the order of the prompts.

        prompts: a text, token ids, {"prompt": …}, {"prompt_token_ids": …}, or a list of such. sampling_params: for all
        or one a prompt; a dictionary has SGLang's names; None: the model's defaults. use_tqdm: shows progress on a
        terminal. priority: for `schedule_policy="priority"`, larger is served first. grammar: as `structured_outputs`
        of SamplingParams.

        Raises InvalidRequest, a ValueError, before anything runs, and GenerationInterrupted at Ctrl-C.
        """
        return self._generate(self.texts.tokenize(prompts), sampling_params, use_tqdm, priority, grammar)

    def chat(
        self,
        messages: Conversations,
        sampling_params: ParamsOfEach = None,
        use_tqdm: bool = True,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        thinking: bool | None = None,
        reasoning_effort: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        priority: int | Sequence[int] | None = None,
        grammar: GrammarOfEach = NO_GRAMMAR,
    ) -> list[RequestOutput]:
        """Answers a conversation (OpenAI messages), or each of several.

        thinking: short for chat_template_kwargs={"thinking": …}. reasoning_effort: "none" turns thinking off, any
        other value on. continue_final_message: the answer continues the last message. A structure holds after the
        thought. The rest is as in `generate`.
        """
        arguments = with_thinking(chat_template_kwargs, reasoning_effort, thinking)
        rendered = [
            self.texts.render(each, tools, arguments, add_generation_prompt, continue_final_message)
            for each in conversations(messages)
        ]
        return self._generate(rendered, sampling_params, use_tqdm, priority, grammar)

    def score(self, prompts: Prompts, use_tqdm: bool = True) -> list[list[float]]:
        """Log-probabilities of each prompt's tokens 1 to the last, in nats."""
        return [prompt_scores(result) for result in self.generate(prompts, SCORING, use_tqdm)]

    def get_tokenizer(self) -> ChatTokenizer:
        """The tokenizer, with the methods of transformers' that scripts use most."""
        return ChatTokenizer(self.texts)

    def get_default_sampling_params(self) -> SamplingParams:
        """A copy of those of the model's generation_config.json, to be changed."""
        return self.texts.resolved.sampling.clone()

    def reset_prefix_cache(self) -> bool:
        """Empties the prefix cache. Returns True, as vLLM's."""
        self._check_running()
        self.engine.flush_cache()
        return True

    def update_weights_from_disk(self, model_path: str, flush_cache: bool = True) -> str:
        """Replaces the tensors that the folder's checkpoint has. Returns a message with their number. flush_cache: also
        empties the prefix cache. Raises InvalidRequest, without any change, for a folder that does not fit.
        """
        return self._control(UpdateWeights(0, model_path, flush_cache))

    def start_profile(self, folder: str, steps: int = 0, shapes: bool = False, stacks: bool = False) -> str:
        """Profiles for so many steps, or until `stop_profile`. Raises InvalidRequest if a profile runs."""
        return self._control(StartProfile(0, folder, steps, shapes=shapes, stacks=stacks))

    def stop_profile(self) -> str:
        """Writes the Chrome trace. Returns its path. Raises InvalidRequest if no profile runs."""
        return self._control(StopProfile(0))

    def dump_expert_distribution(self, folder: str) -> str:
        """Writes where experts are and how many tokens chose each, as `init_expert_location` reads it. Returns the
        file's path. Raises InvalidRequest without `enable_eplb`.
        """
        return self._control(DumpExperts(0, folder))

    def shutdown(self) -> None:
        """Ends the engine and the processes beside this one (`tp_size`, `pp_size`, `dp_size`). Python does it at its
        exit, too.
        """
        self._is_shut_down = True
        self.engine.close()

    def _control(self, message: Control) -> str:
        self._check_running()
        return self.engine.control(message)

    def _check_running(self) -> None:
        if self._is_shut_down:
            raise EngineDead("it was shut down: make a new LLM")

    def _generate(
        self,
        prompts: Sequence[TokenizedPrompt],
        sampling_params: ParamsOfEach,
        use_tqdm: bool,
        priority: int | Sequence[int] | None,
        grammar: GrammarOfEach,
    ) -> list[RequestOutput]:
        self._check_running()
        request_ids = [str(next(self._ids)) for _ in prompts]
        requests = self.texts.prepare(prompts, sampling_params, grammar, priority, request_ids, self._check)
        with deferred_interrupt() as is_interrupted, ThroughputBar(len(requests), use_tqdm) as bar:
            return self._run(requests, bar, is_interrupted)

    def _check(self, ids: Sequence[int], params: SamplingParams, grammar: Grammar) -> None:
        check_request(ids, params, self.engine.context, self.engine.vocab, grammar)

    def _run(
        self, requests: Sequence[PreparedRequest], bar: ThroughputBar, is_interrupted: Callable[[], bool]
    ) -> list[RequestOutput]:
        """Runs the engine until all requests have ended. Raises InvalidRequest for those that it refuses."""
        builders = [OutputBuilder(request, self.texts.tokenizer) for request in requests]
        owners: dict[int, tuple[OutputBuilder, Assembler]] = {}
        for number in submission_order([len(request.ids) for request in requests], self.engine.config.dp_size):
            request = requests[number]
            uids = self.engine.submit(request.ids, request.params, **request.options)
            for index, uid in enumerate(uids):
                owners[uid] = builders[number], Assembler(index, request.ids, request.params, self.texts.tokenizer)
        try:
            while owners and not is_interrupted():
                for delta in self.engine.step():
                    if (owner := owners.get(delta.uid)) is None:
                        continue  # tokens after a stop string
                    builder, assembler = owner
                    piece = assembler.feed(delta, 0.0)
                    builder.add(piece)
                    bar.add(piece, builder.output.finished)
                    if assembler.ended:
                        del owners[delta.uid]
                        if not delta.finish:
                            self.engine.abort((delta.uid,))
        finally:
            self.engine.abort(tuple(owners))  # those left by an error or Ctrl-C end at the next step
        while not self.engine.idle:
            self.engine.step()
        if is_interrupted():
            for builder in builders:
                builder.end("abort")
            raise GenerationInterrupted([builder.output for builder in builders])
        return [builder.output for builder in builders]


def submission_order(lengths: Sequence[int], ranks: int) -> list[int]:
    """Numbers of the prompts with these lengths, as they are submitted. To several data-parallel ranks the longest go
    first: a long prompt that is assigned last leaves its rank with more work than the others.
    """
    numbers = list(range(len(lengths)))
    return sorted(numbers, key=lambda number: -lengths[number]) if ranks > 1 else numbers


SCORING = SamplingParams(max_tokens=0, prompt_logprobs=0, temperature=0.0)


def prompt_scores(result: RequestOutput) -> list[float]:
    """Log-probabilities of tokens 1 to the last of a prompt that was run with SCORING."""
    entries = (result.prompt_logprobs or [])[1:]
    scored = zip(entries, result.prompt_token_ids[1:], strict=True)
    return [entry[token].logprob for entry, token in scored if entry is not None]


class ThroughputBar:
    """Progress of a call on a terminal, with prompts and tokens a second."""

    def __init__(self, prompts: int, is_shown: bool) -> None:
        console = Console(stderr=True)
        column = TextColumn("{task.fields[speed]}")
        self._bar = Progress(*BAR_COLUMNS, column, console=console, disable=not (is_shown and console.is_terminal))
        self._task = self._bar.add_task("prompts", total=prompts, speed="")
        self._begin, self._done, self._input, self._output = time.perf_counter(), 0, 0, 0

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._bar.stop()

    def add(self, piece: Piece, finished: bool) -> None:
        """finished: the prompt's outputs have all ended."""
        if self._bar.disable:
            return
        self._output += len(piece.ids)
        if finished:
            self._done, self._input = self._done + 1, self._input + piece.prompt_tokens
        seconds = max(time.perf_counter() - self._begin, 1e-9)
        rates = self._done / seconds, self._input / seconds, self._output / seconds
        speed = "{:,.2f} it/s, input {:,.0f} tok/s, output {:,.0f} tok/s".format(*rates)
        self._bar.update(self._task, advance=finished, speed=speed)


@contextlib.contextmanager
def deferred_interrupt() -> Iterator[Callable[[], bool]]:
    """Ctrl-C inside is noted, for a step that is cut off would break the engine. A second one interrupts at once.

    It yields whether Ctrl-C was pressed. Handlers of the program, and threads beside the main one, stay as they are.
    """
    noted: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        if noted:
            signal.default_int_handler(number, frame)
        noted.append(number)

    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield lambda: False
        return
    signal.signal(signal.SIGINT, note)
    try:
        yield lambda: bool(noted)
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
