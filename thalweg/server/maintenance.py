"""Admin routes, under SGLang's names: new weights and profiles of a running engine."""

from __future__ import annotations

from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response

from thalweg.core.errors import InvalidRequest
from thalweg.core.messages import StartProfile, StopProfile, UpdateWeights
from thalweg.server.context import AppContext, reply
from thalweg.server.errors import ApiError, ErrorInfo
from thalweg.server.protocol import StartProfileRequest, UpdateWeightsRequest

MAX_VERSION = 256  # characters
MAX_STEPS = 2**31 - 1  # of a profile


async def update_weights_from_disk(ctx: AppContext, request: Request, body: UpdateWeightsRequest) -> Response:
    """Replaces the weights that a folder holds, between two steps. A 400 has changed nothing. Running requests
    continue.
    """
    if not body.model_path or "\0" in body.model_path:
        raise InvalidRequest("model_path", "must name a folder on the engine's machine")
    version = body.weight_version or ""
    if len(version) > MAX_VERSION:
        raise InvalidRequest("weight_version", f"has {len(version)} characters; at most {MAX_VERSION}")
    # links are resolved now: an engine that restarts must not follow them to another folder
    path, flush = str(Path(body.model_path).resolve()), body.flush_cache is not False
    message = await ctx.front.control(UpdateWeights(0, path, flush, bool(body.abort_all_requests), version))
    return reply({"success": True, "message": message, "num_paused_requests": 0})


async def start_profile(ctx: AppContext, request: Request, body: StartProfileRequest) -> Response:
    """Profiles the engine's steps until /stop_profile, or for num_steps. An empty body is {}."""
    root = _profile_folder(ctx)
    steps = body.num_steps or 0
    if body.num_steps is not None and not 1 <= steps <= MAX_STEPS:
        message = f"must lie between 1 and {MAX_STEPS}, got {steps}; leave it out to end it by /stop_profile"
        raise InvalidRequest("num_steps", message)
    activities = {"CPU", "GPU"} if body.activities is None else set(body.activities)
    if not activities:
        raise InvalidRequest("activities", "must name CPU, GPU or both; leave it out for both")
    folder = _within(root, body.output_dir or "")
    profile = StartProfile(
        0,
        str(folder),
        steps,
        cpu="CPU" in activities,
        gpu="GPU" in activities,
        shapes=bool(body.record_shapes),
        stacks=bool(body.with_stack),
    )
    profiled = await ctx.front.control(profile)
    until = f"for {steps} steps" if steps else "until /stop_profile"
    return reply({"success": True, "message": f"profiling {profiled} {until}, into {folder}"})


async def stop_profile(ctx: AppContext, request: Request) -> Response:
    """Ends the profile and writes it: a Chrome trace, for Perfetto."""
    _profile_folder(ctx)
    return reply({"success": True, "message": f"written: {await ctx.front.control(StopProfile(0))}"})


def _profile_folder(ctx: AppContext) -> Path:
    if ctx.options.profile_folder is None:
        message = "profiles are off: --profile-folder DIR turns them on, and says where they are written"
        raise ApiError(ErrorInfo(403, message, "permission_error", code="profiles_off"))
    return Path(ctx.options.profile_folder).resolve()


def _within(root: Path, path: str) -> Path:
    """A folder, absolute or relative to `root`, links followed. Raises InvalidRequest if it is outside `root`."""
    if "\0" in path:
        raise InvalidRequest("output_dir", "must be a path")
    try:
        folder = (root / path).resolve()
    except (OSError, RuntimeError) as error:  # a loop of links, a name too long
        raise InvalidRequest("output_dir", f"is not a path: {error}") from None
    if not folder.is_relative_to(root):
        raise InvalidRequest("output_dir", f"must lie within the server's --profile-folder, {root}: give it from there")
    return folder
