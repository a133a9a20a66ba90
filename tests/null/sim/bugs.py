"""Planted bugs: each replaces one method of the real code or of the simulated device. Every one must make some mix
fail.
"""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import Any, Callable, Iterator
from unittest import mock

from tests.null.sim.device import Device, SimWorker, Slot
from thalweg.cache.page_allocator import PageAllocator
from thalweg.cache.radix import DETACHED, PrefixCursor, RadixTree
from thalweg.core.messages import TokenDelta
from thalweg.core.request import ReleaseReason, Request, RequestState
from thalweg.core.ticket import TicketState
from thalweg.core.tree import TreeShape
from thalweg.engine.loop import Loop
from thalweg.scheduler.draft_length import FixedDraftLength
from thalweg.scheduler.kv_cache import KVCacheManager
from thalweg.scheduler.plan_builder import PlanBuilder
from thalweg.scheduler.results import StepResultProcessor
from thalweg.scheduler.scheduler import Scheduler

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


@plant(StepResultProcessor, "process")
def _finish_frees(real: Wrapper, results: StepResultProcessor, r: Request, output: Any) -> None:
    real(results, r, output)
    if r.release_reason is ReleaseReason.FINISH:
        results.kv_cache.allocator.release(r.pages)


@plant(Scheduler, "_release_pages")
def _freed_before(real: Wrapper, scheduler: Scheduler, r: Request) -> None:
    if r.release_reason is ReleaseReason.FINISH:
        del scheduler.live[r.uid]
    else:
        real(scheduler, r)


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


@plant(Loop, "launch_and_commit")
def mask_late(real: Wrapper, loop: Loop, plan: Any, agreed: Any) -> None:
    real(loop, replace(plan, waits_for_commit=False), agreed)


# ---- planning


@plant(Scheduler, "_plan_decoding")
def cohort(real: Wrapper, scheduler: Scheduler, builder: PlanBuilder) -> None:
    for r in scheduler._decoding:
        r.last_sampled = -scheduler.stages
    real(scheduler, builder)


@plant(Scheduler, "_plan_decoding")
def wrong_width(real: Wrapper, scheduler: Scheduler, builder: PlanBuilder) -> None:
    for r in scheduler._decoding:
        r.num_drafts = scheduler.loop_width  # type: ignore[attr-defined]
    real(scheduler, builder)


@plant(Scheduler, "_plan_decoding")
def drafts_without_pages(real: Wrapper, scheduler: Scheduler, builder: PlanBuilder) -> None:
    policy, scheduler.draft_length = scheduler.draft_length, FixedDraftLength(0)
    real(scheduler, builder)
    scheduler.draft_length = policy


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
def _remember_width(real: Wrapper, scheduler: Scheduler, width: int, may_prefill: bool) -> Any:
    scheduler.loop_width = width  # type: ignore[attr-defined]
    return real(scheduler, width, may_prefill)


PLANTED["wrong_width"] += PLANTED.pop("_remember_width")


@plant(Scheduler, "plan")
def stale_publish(real: Wrapper, scheduler: Scheduler, width: int, may_prefill: bool) -> Any:
    return replace(real(scheduler, width, may_prefill), published_step=max(scheduler.step - scheduler.stages, -1))


@plant(Scheduler, "_plan_chunk")
def insert_same_step(real: Wrapper, scheduler: Scheduler, r: Request, builder: PlanBuilder) -> None:
    real(scheduler, r, builder)
    scheduler.kv_cache.cache_full_pages(r, min(r.num_computed_tokens, len(r.prompt)))


@plant(KVCacheManager, "cache_full_pages")
def insert_early(real: Wrapper, kv_cache: KVCacheManager, r: Request, positions: int) -> None:
    real(kv_cache, r, min(positions + 1, r.num_tokens))


@plant(PlanBuilder, "add_prefill_row")
def scores_twice(real: Wrapper, builder: PlanBuilder, r: Request, n: int) -> None:
    first, last = (
        max(r.num_computed_tokens, r.prompt_logprobs_start - 1),
        min(r.num_computed_tokens + n, len(r.prompt) - 1),
    )
    real(builder, r, n)
    if first < last:
        top = r.params.prompt_logprobs or 0
        builder.rows[-1] = builder.rows[-1]._replace(
            prompt_logprobs_start=first, prompt_logprobs_stop=last, prompt_logprobs_top_k=top
        )


@plant(KVCacheManager, "append_pages")
def growth_forgotten(real: Wrapper, kv_cache: KVCacheManager, r: Request, count: int) -> Any:
    real(kv_cache, r, count)
    return ()


@plant(KVCacheManager, "num_retained_tokens")
def thoughts_cached(real: Wrapper, kv_cache: KVCacheManager, r: Request) -> int:
    """The prefix cache keeps what no prompt will ever hold again."""
    return r.num_tokens


@plant(KVCacheManager, "num_retained_tokens")
def calls_forgotten(real: Wrapper, kv_cache: KVCacheManager, r: Request) -> int:
    """A thought that ended in a tool call is dropped too, although its results' prompt holds it."""
    return r.num_tokens if r.retention.keeps_thoughts or r.release_reason is ReleaseReason.PREEMPT else len(r.prompt)


@plant(KVCacheManager, "remove")
def left_behind(real: Wrapper, kv_cache: KVCacheManager, r: Request) -> None:
    """What a preempted request cached for itself stays after its end."""
    del kv_cache.cursors[r.uid]
    kv_cache.to_trim.discard(r.uid)


# ---- admission


@plant(KVCacheManager, "max_hit_pages")
def hit_full(real: Wrapper, kv_cache: KVCacheManager, r: Request) -> int:
    return real(kv_cache, r) if r.params.prompt_logprobs is not None else r.num_tokens // kv_cache.page_size


@plant(KVCacheManager, "max_hit_pages")
def hit_skips_scores(real: Wrapper, kv_cache: KVCacheManager, r: Request) -> int:
    return (r.num_tokens - 1) // kv_cache.page_size


@plant(KVCacheManager, "add")
def no_salt(real: Wrapper, kv_cache: KVCacheManager, r: Request) -> None:
    kv_cache.cursors[r.uid] = PrefixCursor(r.tokens, 0)


@plant(Scheduler, "_is_blocked")
def sibling_early(real: Wrapper, scheduler: Scheduler, r: Request, *rest: Any) -> bool:
    return False


@plant(Scheduler, "_finish_transfer")
def ticket_ignored(real: Wrapper, scheduler: Scheduler, r: Request) -> None:
    if r.ticket is not None and r.state is RequestState.LOADING:
        r.ticket.state = TicketState.OK
    real(scheduler, r)


@plant(KVCacheManager, "allocate")
def hit_not_leased(real: Wrapper, kv_cache: KVCacheManager, r: Request, upto: int, reserve: int) -> Any:
    ticket = real(kv_cache, r, upto, reserve)
    if ticket is not None:
        kv_cache.allocator.release(r.pages[: r.num_computed_tokens // kv_cache.page_size])
    return ticket


# ---- leaving


def _at_once(why: ReleaseReason) -> Wrapper:
    def leave(real: Wrapper, scheduler: Scheduler, r: Request, reason: ReleaseReason) -> None:
        r.release_reason = reason
        if reason is why or (not r.rows_in_flight and r.state is RequestState.RUNNING):
            if r in scheduler._transferring:
                scheduler._transferring.remove(r)
            scheduler._release(r)

    return leave


PLANTED["preempt_now"] = [(Scheduler, "_mark_for_release", _at_once(ReleaseReason.PREEMPT))]
PLANTED["abort_frees"] = [(Scheduler, "_mark_for_release", _at_once(ReleaseReason.ABORT))]


@plant(Scheduler, "_release")
def send_unpinned(real: Wrapper, scheduler: Scheduler, r: Request) -> None:
    real(scheduler, r)
    if r.state is RequestState.SENDING:
        scheduler.kv_cache.release_pages(r)


@plant(Scheduler, "_release_pages")
def pages_kept(real: Wrapper, scheduler: Scheduler, r: Request) -> None:
    del scheduler.live[r.uid]


@plant(KVCacheManager, "release_slot")
def slot_kept(real: Wrapper, kv_cache: KVCacheManager, r: Request) -> None:
    if r.release_reason is ReleaseReason.ABORT:
        r.slot = -1
    else:
        real(kv_cache, r)


# ---- committing


@plant(StepResultProcessor, "process")
def zero_tokens_never_end(real: Wrapper, results: StepResultProcessor, r: Request, output: Any) -> None:
    if r.end > len(r.prompt):
        real(results, r, output)
    else:
        r.prompt_logprobs.extend(output.prompt_logprobs)


@plant(StepResultProcessor, "process")
def zero_tokens_end_early(real: Wrapper, results: StepResultProcessor, r: Request, output: Any) -> None:
    if r.end == len(r.prompt) and r.release_reason is ReleaseReason.NONE:
        r.num_computed_tokens = r.prefill_len = r.end
        r.rows_in_flight, flight = 0, r.rows_in_flight
        real(results, r, output)
        r.rows_in_flight = flight
    else:
        real(results, r, output)


@plant(StepResultProcessor, "process")
def preempted_earns_nothing(real: Wrapper, results: StepResultProcessor, r: Request, output: Any) -> None:
    if r.release_reason is not ReleaseReason.PREEMPT:
        real(results, r, output)


@plant(StepResultProcessor, "process")
def stop_is_length(real: Wrapper, results: StepResultProcessor, r: Request, output: Any) -> None:
    stop_ids, r.stop_ids = r.stop_ids, ()
    real(results, r, output)
    r.stop_ids = stop_ids


@plant(Scheduler, "_abort")
def abort_is_silent(real: Wrapper, scheduler: Scheduler, uid: int) -> None:
    count = len(scheduler.results._deltas)
    real(scheduler, uid)
    del scheduler.results._deltas[count:]


@plant(Scheduler, "commit")
def zombie_news(real: Wrapper, scheduler: Scheduler, plan: Any, outputs: Any) -> None:
    gone = [r for row in plan.rows if (r := scheduler.requests[row.uid]).release_reason is ReleaseReason.ABORT]
    real(scheduler, plan, outputs)
    scheduler.results._deltas += [TokenDelta(r.uid, (1,)) for r in gone]


# ---- the allocator: `cache_driver.py` must catch these


@plant(RadixTree, "_detach")
def cache_evict_leased(real: Wrapper, tree: RadixTree, node: Any, freed: list[int]) -> None:
    """An eviction gives away the whole subtree, what others lease of it too."""
    below, pages = [node], []
    while below:
        n = below.pop()
        pages.append(n.page)
        below.extend(n.children.values())
    real(tree, node, freed)
    freed.extend(p for p in pages if p > 0 and p not in freed)


@plant(RadixTree, "_detach")
def cache_orphans(real: Wrapper, tree: RadixTree, node: Any, freed: list[int]) -> None:
    """An eviction takes the node only: what is below stays cached, and nobody finds it."""
    children = dict(node.children)
    node.children.clear()
    real(tree, node, freed)
    node.children.update(children)


@plant(RadixTree, "_resume")
def cache_dead_cursor(real: Wrapper, tree: RadixTree, path: PrefixCursor) -> Any:
    """A sequence goes on from a node that was evicted."""
    return (path.node, path.depth) if path.node is not None and path.node.page == DETACHED else real(tree, path)


@plant(RadixTree, "insert")
def cache_stale_epoch(real: Wrapper, tree: RadixTree, path: PrefixCursor, pages: Any, count: int) -> None:
    """What was computed before a flush is found after it."""
    path.epoch = tree.epoch
    real(tree, path, pages, count)


@plant(RadixTree, "_root_key")
def cache_no_salt(real: Wrapper, tree: RadixTree, path: PrefixCursor) -> bytes:
    return b"%d:0" % path.epoch


@plant(RadixTree, "mark_evictable")
def cache_parent_first(real: Wrapper, tree: RadixTree, page: int) -> bool:
    """Parents are not moved behind their children in the order of eviction."""
    cached = page in tree._nodes
    if cached:
        tree._evictable[page] = None
    return cached


@plant(PageAllocator, "release")
def cache_free_while_shared(real: Wrapper, allocator: PageAllocator, pages: list[int]) -> None:
    """A page is free when one of its two holders leaves."""
    for page in pages:
        if allocator.ref_counts[page] == 2:
            allocator.ref_counts[page] = 1
    real(allocator, pages)


@plant(PageAllocator, "acquire")
def cache_hold_forgets_idle(real: Wrapper, allocator: PageAllocator, pages: list[int]) -> None:
    """An idle page that is leased again stays on the list of those to evict."""
    for page in pages:
        allocator.ref_counts[page] += 1


@plant(PageAllocator, "allocate")
def cache_evict_early(real: Wrapper, allocator: PageAllocator, count: int) -> list[int]:
    """Evicts while there are free pages."""
    if allocator.tree.num_evictable and count:
        allocator.free_pages.extend(allocator.tree.evict(1))
    return real(allocator, count)


@plant(RadixTree, "evict_tail")
def cache_trim_leased(real: Wrapper, tree: RadixTree, path: PrefixCursor, count: int) -> list[int]:
    """Takes what others lease or stand behind."""
    freed: list[int] = []
    while tree.match(path, len(path.tokens) // tree.page_size) > count:
        tree._detach(path.node, freed)
    return freed


@plant(PageAllocator, "evict_tail")
def cache_trim_loses(real: Wrapper, allocator: PageAllocator, path: PrefixCursor, count: int) -> None:
    allocator.tree.evict_tail(path, count)


@plant(PageAllocator, "flush")
def cache_flush_frees_leased(real: Wrapper, allocator: PageAllocator) -> None:
    leased = [p for p, count in enumerate(allocator.ref_counts) if count]
    real(allocator)
    allocator.free_pages.extend(leased)


CACHE = [name for name in PLANTED if name.startswith("cache_")]
SCHEDULER = [name for name in PLANTED if name not in CACHE]
