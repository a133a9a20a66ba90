"""What an operator does to a running engine: other weights, profiles. Routes of the admin key, under SGLang's names."""

from __future__ import annotations

from pathlib import Path

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from thalweg.core.errors import InvalidRequest
from thalweg.core.messages import StartProfile, StopProfile, UpdateWeights
from thalweg.server.context import AppContext, reply
from thalweg.server.errors import ApiError, ErrorInfo
from thalweg.server.parsing import read
from thalweg.server.protocol import StartProfileRequest, UpdateWeightsRequest

_update = msgspec.json.Decoder(UpdateWeightsRequest)
_start = msgspec.json.Decoder(StartProfileRequest)
MAX_VERSION = 256  # characters
MAX_STEPS = 2**31 - 1  # of a profile


async def update_weights_from_disk(ctx: AppContext, request: Request) -> Response:
    """Replaces the weights that a folder holds, between two steps; a 400 has changed nothing. Running requests go
    on.
    """
    body = read(await request.body(), _update)
    body.refuse()
    if not body.model_path or "\0" in body.model_path:
        raise InvalidRequest("model_path", "must name a folder on the engine's machine")
    version = body.weight_version or ""
    if len(version) > MAX_VERSION:
        raise InvalidRequest("weight_version", f"has {len(version)} characters; at most {MAX_VERSION}")
    flush = body.flush_cache is not False
    # where a link points now: an engine that has to start again must not follow it elsewhere
    wish = UpdateWeights(0, str(Path(body.model_path).resolve()), flush, bool(body.abort_all_requests), version)
    return reply({"success": True, "message": await ctx.front.control(wish), "num_paused_requests": 0})


async def start_profile(ctx: AppContext, request: Request) -> Response:
    """Profiles the engine's steps from here on, until /stop_profile or for num_steps. An empty body is {}."""
    root = _root(ctx)
    body = read(await request.body() or b"{}", _start)
    body.refuse()
    steps = body.num_steps or 0
    if body.num_steps is not None and not 1 <= steps <= MAX_STEPS:
        raise InvalidRequest(
            "num_steps", f"must lie between 1 and {MAX_STEPS}, got {steps}; leave it out to end it by /stop_profile"
        )
    watched = {"CPU", "GPU"} if body.activities is None else set(body.activities)
    if not watched:
        raise InvalidRequest("activities", "must name CPU, GPU or both; leave it out for both")
    folder = _within(root, body.output_dir or "")
    wish = StartProfile(
        0,
        str(folder),
        steps,
        cpu="CPU" in watched,
        gpu="GPU" in watched,
        shapes=bool(body.record_shapes),
        stacks=bool(body.with_stack),
    )
    told = await ctx.front.control(wish)
    until = f"for {steps} steps" if steps else "until /stop_profile"
    return reply({"success": True, "message": f"profiling {told} {until}, into {folder}"})


async def stop_profile(ctx: AppContext, request: Request) -> Response:
    """Ends the profile and writes it: a Chrome trace, for Perfetto."""
    _root(ctx)
    return reply({"success": True, "message": f"written: {await ctx.front.control(StopProfile(0))}"})


def _root(ctx: AppContext) -> Path:
    if ctx.options.profile_folder is None:
        message = "profiles are off: --profile-folder DIR turns them on, and says where they are written"
        raise ApiError(ErrorInfo(403, message, "permission_error", code="profiles_off"))
    return Path(ctx.options.profile_folder).resolve()


def _within(root: Path, wish: str) -> Path:
    """The folder `wish`, absolute or from `root` on. Raises InvalidRequest where it does not lie in `root`, links
    followed.
    """
    if "\0" in wish:
        raise InvalidRequest("output_dir", "must be a path")
    try:
        folder = (root / wish).resolve()
    except (OSError, RuntimeError) as error:  # a loop of links, a name too long
        raise InvalidRequest("output_dir", f"is no path: {error}") from None
    if not folder.is_relative_to(root):
        raise InvalidRequest("output_dir", f"must lie within the server's --profile-folder, {root}; give it from there")
    return folder
