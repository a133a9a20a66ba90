"""`thalweg chat`: a conversation in the terminal, streamed, with the thought in grey."""

from __future__ import annotations

import asyncio
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


def chat(resolved: Resolved, params: SamplingParams, system: str, thinking: bool | None) -> int:
    """Reads lines and streams answers until the input ends. Raises EngineDead, and CheckpointError when there is no
    tokenizer.
    """
    return asyncio.run(_talk(resolved, params, system, thinking))


async def _talk(resolved: Resolved, params: SamplingParams, system: str, thinking: bool | None) -> int:
    console, tokenizer, chat = Console(highlight=False), resolved.reader(), resolved.chat
    front = EngineClient(resolved.engine, tokenizer)
    await front.start()
    console.print(
        f"[dim]{resolved.names[0]}: /new forgets the conversation, Ctrl-D leaves, Ctrl-C stops an answer[/dim]"
    )
    memory, reasoning = ThinkingRetention(chat, tokenizer.mark_id), chat.formats.reasoning
    if reasoning:  # the parser reads the markup, which is made of special tokens
        params = msgspec.structs.replace(params, skip_special_tokens=False)
    opening = [{"role": "system", "content": system}] if system else []
    history = list(opening)

    async def answer() -> str:
        """Streams one answer; returns its content, thought left out."""
        prompt = chat.encoder.encode(history, thinking=thinking)
        parser = AnswerParser(reasoning, thinking=thinking, inside=is_in_thought(prompt))
        keep = memory.keep(prompt, {} if thinking is None else {"thinking": thinking}, tools=False)
        content: list[str] = []
        try:
            async with aclosing(front.stream(tokenizer.encode(prompt), params, retention=keep)) as stream:
                async for piece in stream:
                    _show(parser.feed(piece.text), console, content)
        except InvalidRequest as error:
            console.print(f"[red]{error.message}[/red] (/new starts afresh)")
        except asyncio.CancelledError:
            console.print("[dim] (stopped)[/dim]", end="")
        _show(parser.finish(), console, content)
        console.print()
        return "".join(content)

    try:
        while (line := await _ask(console)) is not None:
            if line == "/new":
                history[:] = opening
            elif line:
                history.append({"role": "user", "content": line})
                history.append({"role": "assistant", "content": await answer()})
    finally:
        await front.close()
    return 0


async def _ask(console: Console) -> str | None:
    """A line, or None at the end of the input."""
    try:
        return (await asyncio.to_thread(console.input, "[bold]> [/bold]")).strip()
    except (EOFError, KeyboardInterrupt, asyncio.CancelledError):
        return None


def _show(events: list[Event], console: Console, content: list[str]) -> None:
    for event in events:
        if event.part.kind is PartKind.REASONING:
            console.print(event.text, end="", style="dim", markup=False)
        elif event.part.kind is PartKind.TEXT:
            content.append(event.text)
            console.print(event.text, end="", markup=False)
