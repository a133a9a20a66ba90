"""An estimate of a step's time: each phase of the lower bound takes longer by what its kernels miss of a data sheet's
rate, and launches and activations come on top.

The constants are least squares of the relative errors over the 61 steps of H100 and H200 that
`tests/cpu/test_plan_estimate.py` reads from `benchmarks/gpu` (2026-11-29), and that of index scores of V3.2's 14 alone
(2026-11-30).
"""

from __future__ import annotations

from thalweg.config.machines import Hardware
from thalweg.launch.planning.collectives import ACTIVATION, collectives
from thalweg.launch.planning.roofline import Ceilings, StepShape, phases
from thalweg.launch.planning.weights import RankModel

# time / least time of reading, of bf16 and of FP8 FLOPs
DENSE = 1.08, 1.43, 2.09
OTHERS = {"attention": (1.48, 1.14, 2.09), "experts": (1.24, 1.43, 2.09), "index": (1.08, 4.65, 4.65)}
PASSES = 4.3  # times that a layer reads or writes its activations
STEP, LAYER = 330e-6, 8.6e-6  # seconds of launches: of a step, and of each layer
SELECTING, PROMPT = 102e-6, 215e-6  # more in a layer that selects context, and in each of a step in pieces
CAPTURED = 512  # tokens up to which a step is captured whole
COLLECTIVE, LINK = 35e-6, 4.2  # seconds of a collective, and time / least time of its bytes; of four H100 alone


def estimated(model: RankModel, shape: StepShape, top: Ceilings, hardware: Hardware) -> dict[str, float]:
    """Seconds by kind of work of a step of each attention with this shape."""
    facts, sends = model.facts, collectives(model.facts, shape, model.layout)
    selecting = 0 if facts.indexer is None else sum(facts.indexer.full)
    a_layer = LAYER + PROMPT * (shape.tokens > CAPTURED)
    times = {
        "launches": STEP * model.layout.pp + a_layer * facts.layers + SELECTING * selecting,
        "activations": PASSES * _activations(model, shape) / top.read,
        "sending": sum(
            one.count * COLLECTIVE + LINK * (one.seconds(hardware) - one.count * one.latency) for one in sends
        ),
    }
    for phase in phases(model, shape):
        read, bf16, fp8 = OTHERS.get(phase.name, DENSE)
        plain = phase.bf16 + phase.fp4  # our products with FP4 weights have 16-bit activations
        computing = bf16 * plain / top.bf16 + fp8 * phase.fp8 / top.fp8
        times[phase.name] = times.get(phase.name, 0.0) + max(read * phase.bytes / top.read, computing)
    return times


def _activations(model: RankModel, shape: StepShape) -> float:
    """Bytes of a hidden state for each token and layer, and of the hidden and inner states of the experts' rows."""
    facts, layout, moe = model.facts, model.layout, model.facts.moe
    numbers = shape.tokens / layout.cp * facts.layers * facts.hidden
    if moe is not None:
        layers = sum(moe.in_layer(layer) for layer in range(facts.layers))
        rows = shape.tokens * (shape.attentions or layout.dp) * moe.topk / layout.ep
        numbers += layers * rows * (facts.hidden + 2 * moe.intermediate * layout.ep / layout.tp)
    return ACTIVATION * numbers
