"""Planted bugs: each replaces one method of the real code (or of the simulated device) for as long as it is planted.
The proof is worth what it catches, so every one of these must make some mix fail.
"""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import Any, Callable, Iterator
from unittest import mock

from tests.null.sim.device import Device, SimWorker, Slot
from thalweg.cache.books import Books
from thalweg.cache.radix import DEAD, Path, RadixTree
from thalweg.core.messages import TokenDelta
from thalweg.core.request import Exit, Request, RequestState
from thalweg.core.ticket import TicketState
from thalweg.core.tree import TreeShape
from thalweg.engine.loop import Loop
from thalweg.scheduler.earnings import Earnings
from thalweg.scheduler.holdings import Holdings
from thalweg.scheduler.scheduler import Scheduler
from thalweg.scheduler.sheet import Sheet
from thalweg.scheduler.widths import ConstantWidth

Wrapper = Callable[..., Any]  # takes the real method first, then its arguments
PLANTED: dict[str, list[tuple[type, str, Wrapper]]] = {}


def plant(owner: type, method: str) -> Callable[[Wrapper], Wrapper]:
    """The decorated function is one bug: it stands for `owner.method`, which it gets as its first argument."""

    def note(wrapper: Wrapper) -> Wrapper:
        PLANTED.setdefault(wrapper.__name__, []).append((owner, method, wrapper))
        return wrapper

    return note


@contextlib.contextmanager
def planted(name: str) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for owner, method, wrapper in PLANTED[name]:
            real = getattr(owner, method)

            def patched(*args: Any, _real: Any = real, _wrapper: Wrapper = wrapper, **named: Any) -> Any:
                return _wrapper(_real, *args, **named)

            stack.enter_context(mock.patch.object(owner, method, patched))
        yield


# ---- the device and the loop


@plant(Device, "is_padding")
def zombie_computes(real: Wrapper, device: Device, slot: Any) -> bool:
    return False


@plant(Earnings, "earn")
def _finish_frees(real: Wrapper, earnings: Earnings, r: Request, output: Any) -> None:
    real(earnings, r, output)
    if r.exit is Exit.FINISH:
        earnings.holdings.books.drop(r.pages)


@plant(Scheduler, "_vacate")
def _freed_before(real: Wrapper, brain: Scheduler, r: Request) -> None:
    if r.exit is Exit.FINISH:
        del brain.live[r.uid]
    else:
        real(brain, r)


PLANTED["zombie_computes"] += PLANTED.pop("_finish_frees") + PLANTED.pop("_freed_before")


@plant(Device, "cut")
def ignore_end(real: Wrapper, device: Device, n: int, slot: Any, start: int) -> int:
    return n


@plant(Device, "ring_size")
def ring_early(real: Wrapper, device: Device, depth: int) -> int:
    return max(1, depth - 1)


@plant(SimWorker, "output")
def read_early(real: Wrapper, worker: SimWorker, plan: Any) -> Any:
    return worker.device.read(plan.step)


@plant(Loop, "finish")
def mask_late(real: Wrapper, loop: Loop, plan: Any, shape: Any, width: int) -> None:
    real(loop, replace(plan, waits_for_commit=False), shape, width)


# ---- planning


@plant(Scheduler, "_plan_decoding")
def cohort(real: Wrapper, brain: Scheduler, sheet: Sheet) -> None:
    for r in brain._decoding:
        r.last = -brain.stages
    real(brain, sheet)


@plant(Scheduler, "_plan_decoding")
def wrong_width(real: Wrapper, brain: Scheduler, sheet: Sheet) -> None:
    for r in brain._decoding:
        r.made = brain.loop_width  # type: ignore[attr-defined]
    real(brain, sheet)


@plant(Scheduler, "_plan_decoding")
def drafts_without_pages(real: Wrapper, brain: Scheduler, sheet: Sheet) -> None:
    widths, brain.widths = brain.widths, ConstantWidth(0)
    real(brain, sheet)
    brain.widths = widths


@plant(TreeShape, "reserved_columns")
def trees_grow_without_pages(real: Wrapper, shape: TreeShape, width: int) -> int:
    return width


@plant(TreeShape, "max_accepted")
def deep_trees_are_no_chains(real: Wrapper, shape: TreeShape, drafts: int) -> int:
    """As if one draft of a tree were right at most."""
    return min(drafts, 1) if shape.is_tree else drafts


@plant(Device, "_accept")
def left_where_they_were(real: Wrapper, device: Device, x: Slot, *rest: Any) -> Any:
    """The KV of accepted drafts stays where their tree had it."""
    with mock.patch.object(Slot, "straighten"):
        return real(device, x, *rest)


@plant(Scheduler, "plan")
def _remember_width(real: Wrapper, brain: Scheduler, width: int) -> Any:
    brain.loop_width = width  # type: ignore[attr-defined]
    return real(brain, width)


PLANTED["wrong_width"] += PLANTED.pop("_remember_width")


@plant(Scheduler, "plan")
def stale_publish(real: Wrapper, brain: Scheduler, width: int) -> Any:
    return replace(real(brain, width), seen=max(brain.step - brain.stages, -1))


@plant(Scheduler, "_chunk")
def insert_same_step(real: Wrapper, brain: Scheduler, r: Request, sheet: Sheet) -> None:
    real(brain, r, sheet)
    brain.holdings.share(r, min(r.computed, len(r.prompt)))


@plant(Holdings, "share")
def insert_early(real: Wrapper, holdings: Holdings, r: Request, positions: int) -> None:
    real(holdings, r, min(positions + 1, r.known))


@plant(Sheet, "chunk")
def scores_twice(real: Wrapper, sheet: Sheet, r: Request, n: int, step: int) -> None:
    first, last = max(r.computed, r.score_from - 1), min(r.computed + n, len(r.prompt) - 1)
    real(sheet, r, n, step)
    if first < last:
        top = r.params.prompt_logprobs or 0
        sheet.rows[-1] = sheet.rows[-1]._replace(score_from=first, score_to=last, score_top=top)


@plant(Holdings, "grow")
def growth_forgotten(real: Wrapper, holdings: Holdings, r: Request, count: int) -> Any:
    real(holdings, r, count)
    return ()


@plant(Holdings, "lasting")
def thoughts_cached(real: Wrapper, holdings: Holdings, r: Request) -> int:
    """The prefix cache keeps what no prompt will ever hold again."""
    return r.known


@plant(Holdings, "lasting")
def calls_forgotten(real: Wrapper, holdings: Holdings, r: Request) -> int:
    """A thought that ended in a tool call is dropped too, although its results' prompt holds it."""
    return r.known if r.retention.keeps_thoughts or r.exit is Exit.PREEMPT else len(r.prompt)


@plant(Holdings, "leave")
def left_behind(real: Wrapper, holdings: Holdings, r: Request) -> None:
    """What a preempted request cached for itself stays after its end."""
    del holdings.paths[r.uid]
    holdings.parked.discard(r.uid)


# ---- admission


@plant(Holdings, "useful")
def hit_full(real: Wrapper, holdings: Holdings, r: Request) -> int:
    return real(holdings, r) if r.params.prompt_logprobs is not None else r.known // holdings.page


@plant(Holdings, "useful")
def hit_skips_scores(real: Wrapper, holdings: Holdings, r: Request) -> int:
    return (r.known - 1) // holdings.page


@plant(Holdings, "enter")
def no_salt(real: Wrapper, holdings: Holdings, r: Request) -> None:
    holdings.paths[r.uid] = Path(r.tokens, 0)


@plant(Scheduler, "_held")
def sibling_early(real: Wrapper, brain: Scheduler, r: Request, *rest: Any) -> bool:
    return False


@plant(Scheduler, "_land")
def ticket_ignored(real: Wrapper, brain: Scheduler, r: Request) -> None:
    if r.ticket is not None and r.state is RequestState.LOADING:
        r.ticket.state = TicketState.OK
    real(brain, r)


@plant(Holdings, "seat")
def hit_not_leased(real: Wrapper, holdings: Holdings, r: Request, upto: int, reserve: int) -> Any:
    ticket = real(holdings, r, upto, reserve)
    if ticket is not None:
        holdings.books.drop(r.pages[: r.computed // holdings.page])
    return ticket


# ---- leaving


def _at_once(why: Exit) -> Wrapper:
    def leave(real: Wrapper, brain: Scheduler, r: Request, reason: Exit) -> None:
        r.exit = reason
        if reason is why or (not r.flight and r.state is RequestState.RUNNING):
            if r in brain._waiting:
                brain._waiting.remove(r)
            brain._release(r)

    return leave


PLANTED["preempt_now"] = [(Scheduler, "_leave", _at_once(Exit.PREEMPT))]
PLANTED["abort_frees"] = [(Scheduler, "_leave", _at_once(Exit.ABORT))]


@plant(Scheduler, "_release")
def send_unpinned(real: Wrapper, brain: Scheduler, r: Request) -> None:
    real(brain, r)
    if r.state is RequestState.SENDING:
        brain.holdings.clear(r)


@plant(Scheduler, "_vacate")
def pages_kept(real: Wrapper, brain: Scheduler, r: Request) -> None:
    del brain.live[r.uid]


@plant(Holdings, "stand_up")
def slot_kept(real: Wrapper, holdings: Holdings, r: Request) -> None:
    if r.exit is Exit.ABORT:
        r.slot = -1
    else:
        real(holdings, r)


# ---- committing


@plant(Earnings, "earn")
def zero_tokens_never_end(real: Wrapper, earnings: Earnings, r: Request, output: Any) -> None:
    if r.end > len(r.prompt):
        real(earnings, r, output)
    else:
        r.scores.extend(output.scores)


@plant(Earnings, "earn")
def zero_tokens_end_early(real: Wrapper, earnings: Earnings, r: Request, output: Any) -> None:
    if r.end == len(r.prompt) and r.exit is Exit.NONE:
        r.computed = r.base = r.end
        r.flight, flight = 0, r.flight
        real(earnings, r, output)
        r.flight = flight
    else:
        real(earnings, r, output)


@plant(Earnings, "earn")
def preempted_earns_nothing(real: Wrapper, earnings: Earnings, r: Request, output: Any) -> None:
    if r.exit is not Exit.PREEMPT:
        real(earnings, r, output)


@plant(Earnings, "earn")
def stop_is_length(real: Wrapper, earnings: Earnings, r: Request, output: Any) -> None:
    stop_ids, r.stop_ids = r.stop_ids, ()
    real(earnings, r, output)
    r.stop_ids = stop_ids


@plant(Scheduler, "_abort")
def abort_is_silent(real: Wrapper, brain: Scheduler, uid: int) -> None:
    count = len(brain.earnings._news)
    real(brain, uid)
    del brain.earnings._news[count:]


@plant(Scheduler, "commit")
def zombie_news(real: Wrapper, brain: Scheduler, plan: Any, outputs: Any) -> None:
    gone = [r for row in plan.rows if (r := brain.requests[row.uid]).exit is Exit.ABORT]
    real(brain, plan, outputs)
    brain.earnings._news += [TokenDelta(r.uid, (1,)) for r in gone]


# ---- the books: `books_driver.py` must catch these


@plant(RadixTree, "_detach")
def books_evict_leased(real: Wrapper, tree: RadixTree, node: Any, freed: list[int]) -> None:
    """An eviction gives away the whole subtree, what others lease of it too."""
    below, pages = [node], []
    while below:
        n = below.pop()
        pages.append(n.page)
        below.extend(n.children.values())
    real(tree, node, freed)
    freed.extend(p for p in pages if p > 0 and p not in freed)


@plant(RadixTree, "_detach")
def books_orphans(real: Wrapper, tree: RadixTree, node: Any, freed: list[int]) -> None:
    """An eviction takes the node only: what is below stays cached, and nobody finds it."""
    children = dict(node.children)
    node.children.clear()
    real(tree, node, freed)
    node.children.update(children)


@plant(RadixTree, "_resume")
def books_dead_cursor(real: Wrapper, tree: RadixTree, path: Path) -> Any:
    """A sequence goes on from a node that was evicted."""
    return (path.node, path.depth) if path.node is not None and path.node.page == DEAD else real(tree, path)


@plant(RadixTree, "insert")
def books_stale_epoch(real: Wrapper, tree: RadixTree, path: Path, pages: Any, count: int) -> None:
    """What was computed before a flush is found after it."""
    path.epoch = tree.epoch
    real(tree, path, pages, count)


@plant(RadixTree, "_root_key")
def books_no_salt(real: Wrapper, tree: RadixTree, path: Path) -> bytes:
    return b"%d:0" % path.epoch


@plant(RadixTree, "rest")
def books_parent_first(real: Wrapper, tree: RadixTree, page: int) -> bool:
    """Parents are not moved behind their children in the order of eviction."""
    cached = page in tree._nodes
    if cached:
        tree._idle[page] = None
    return cached


@plant(Books, "drop")
def books_free_while_shared(real: Wrapper, books: Books, pages: list[int]) -> None:
    """A page is free when one of its two holders leaves."""
    for page in pages:
        if books.lease[page] == 2:
            books.lease[page] = 1
    real(books, pages)


@plant(Books, "hold")
def books_hold_forgets_idle(real: Wrapper, books: Books, pages: list[int]) -> None:
    """An idle page that is leased again stays on the list of those to evict."""
    for page in pages:
        books.lease[page] += 1


@plant(Books, "take")
def books_evict_early(real: Wrapper, books: Books, count: int) -> list[int]:
    """Evicts while there are free pages."""
    if books.tree.idle and count:
        books.free.extend(books.tree.evict(1))
    return real(books, count)


@plant(RadixTree, "trim")
def books_trim_leased(real: Wrapper, tree: RadixTree, path: Path, count: int) -> list[int]:
    """Takes what others lease or stand behind."""
    freed: list[int] = []
    while tree.match(path, len(path.tokens) // tree.page_size) > count:
        tree._detach(path.node, freed)
    return freed


@plant(Books, "trim")
def books_trim_loses(real: Wrapper, books: Books, path: Path, count: int) -> None:
    books.tree.trim(path, count)


@plant(Books, "flush")
def books_flush_frees_leased(real: Wrapper, books: Books) -> None:
    leased = [p for p, count in enumerate(books.lease) if count]
    real(books)
    books.free.extend(leased)


BOOKS = [name for name in PLANTED if name.startswith("books_")]
BRAIN = [name for name in PLANTED if name not in BOOKS]
