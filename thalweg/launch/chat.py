"""`thalweg chat` and `thalweg run`: a conversation in the terminal, or one answer. The thought is grey."""

from __future__ import annotations

import asyncio
import contextlib
import re
import signal
import threading
from contextlib import aclosing

import msgspec
from rich.console import Console

from thalweg.core.errors import InvalidRequest
from thalweg.core.sampling import SamplingParams
from thalweg.engine.client import EngineClient
from thalweg.launch.resolved import Resolved
from thalweg.text.events import Event, PartKind
from thalweg.text.parser import AnswerParser, is_in_thought
from thalweg.text.retention import ThinkingRetention

COMMAND = re.compile(r"/[a-z?]+")  # alone in a line: a path or a sentence is a message
HELP = "/new forgets the conversation, /bye or Ctrl-D leaves, Ctrl-C stops an answer"


def chat(resolved: Resolved, params: SamplingParams, system: str, thinking: bool | None, prompt: str = "") -> int:
    """Reads lines and streams answers until the input ends. prompt: a message to answer instead. Returns the exit
    status. Raises EngineDead, and CheckpointError when there is no tokenizer.
    """
    try:
        return asyncio.run(_talk(resolved, params, system, thinking, prompt))
    except asyncio.CancelledError:
        raise KeyboardInterrupt from None  # Ctrl-C while the engine started


async def _talk(resolved: Resolved, params: SamplingParams, system: str, thinking: bool | None, prompt: str) -> int:
    console, tokenizer, chat = Console(highlight=False), resolved.reader(), resolved.chat
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGINT, task.cancel)
    front = EngineClient(resolved.engine, tokenizer)
    await front.start()
    if not prompt:
        console.print(f"{resolved.names[0]}: {HELP}", style="dim", markup=False)
    memory, reasoning = ThinkingRetention(chat, tokenizer.mark_id), chat.formats.reasoning
    if reasoning:  # the parser reads the markup, which is made of special tokens
        params = msgspec.structs.replace(params, skip_special_tokens=False)
    opening = [{"role": "system", "content": system}] if system else []
    history = list(opening)

    async def answer() -> str:
        """Streams one answer; returns its content, thought left out."""
        text = chat.encoder.encode(history, thinking=thinking)
        parser = AnswerParser(reasoning, thinking=thinking, inside=is_in_thought(text))
        keep = memory.keep(text, {} if thinking is None else {"thinking": thinking}, tools=False)
        shown: list[Event] = []
        try:
            async with aclosing(front.stream(tokenizer.encode(text), params, retention=keep)) as stream:
                async for piece in stream:
                    _show(parser.feed(piece.text), console, shown)
        except InvalidRequest as error:
            console.print(f"[red]{error.message}[/red] (/new starts afresh)")
        except asyncio.CancelledError:
            task.uncancel()
            console.print("[dim] (stopped)[/dim]", end="")
        _show(parser.finish(), console, shown)
        console.print()
        return "".join(event.text for event in shown if event.part.kind is PartKind.TEXT)

    try:
        while (line := prompt or await _ask(console)) not in (None, "/bye"):
            if not prompt and COMMAND.fullmatch(line):
                if line == "/new":
                    history[:] = opening
                else:
                    known = line in ("/help", "/?")
                    text = HELP if known else f"unknown command {line}; there is /new, /bye, /help"
                    console.print(text, style="dim", markup=False)
            elif line:
                history.append({"role": "user", "content": line})
                history.append({"role": "assistant", "content": await answer()})
            if prompt:
                break
    finally:
        await front.close()
    return 0


async def _ask(console: Console) -> str | None:
    """A line, or None at the end of the input and at Ctrl-C."""
    loop = asyncio.get_running_loop()
    line: asyncio.Future[str | None] = loop.create_future()

    def set_line(text: str | None) -> None:
        if not line.done():
            line.set_result(text)

    def read() -> None:
        text = None
        with contextlib.suppress(EOFError):
            text = console.input("[bold]> [/bold]").strip()
        with contextlib.suppress(RuntimeError):  # Ctrl-C came first, and the loop is closed
            loop.call_soon_threadsafe(set_line, text)

    threading.Thread(target=read, daemon=True).start()  # Ctrl-C does not end a read, and need not wait for it
    with contextlib.suppress(asyncio.CancelledError):
        if (text := await line) is not None:
            return text
    console.print()  # the shell's prompt begins a line of its own
    return None


def _show(events: list[Event], console: Console, shown: list[Event]) -> None:
    """Prints the events, and appends them to those that are shown: a thought is grey, and the answer after it begins on
    a line of its own.
    """
    for event in events:
        if event.part.kind in (PartKind.REASONING, PartKind.TEXT):
            begins = bool(shown) and shown[-1].part.kind is not event.part.kind
            style = "dim" if event.part.kind is PartKind.REASONING else None
            console.print("\n\n" * begins + event.text, end="", style=style, markup=False)
            shown.append(event)
