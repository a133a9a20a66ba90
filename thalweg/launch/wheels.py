"""Libraries that `thalweg doctor` knows: their use, and which release loads on which torch, which pip's markers cannot
say.
"""

from __future__ import annotations

from dataclasses import dataclass

from packaging.specifiers import SpecifierSet


@dataclass(frozen=True, slots=True)
class Wheel:
    """A library that is never required."""

    title: str
    names: tuple[str, ...]  # distributions that bring it, the one to install first
    pins: tuple[tuple[str, str], ...]  # (torch versions, requirement), the first that fits counts
    use: str
    gpu: bool = True  # of use on an NVIDIA GPU only
    cuda: int = 0  # CUDA major that its binary needs; 0: any
    loose_below: str = ""  # below this torch its metadata asks for more than it needs, so pip must not check it

    def requirement(self, torch: str) -> str:
        """What to install beside this torch, "" where no release loads on it."""
        return next((pin for versions, pin in self.pins if within(torch, versions)), "")

    def command(self, torch: str) -> str:
        loose = "--no-deps " if self.loose_below and not within(torch, f">={self.loose_below}") else ""
        return f"pip install {loose}'{self.requirement(torch)}'"


# Which symbols the binaries need was compared with those that torch 2.11 to 2.15 export.
WHEELS = (
    Wheel(
        "flash-mla",
        ("sgl-flash-mla",),
        ((">=2.10,<2.16", "sgl-flash-mla==1.0.0"),),
        "MLA decode and sparse attention on Hopper",
        cuda=13,
        loose_below="2.14.1",
    ),
    Wheel("fa3", ("fa3-fwd",), ((">=2.11,<2.16", "fa3-fwd==0.0.3"),), "prefill attention on Hopper", cuda=13),
    Wheel(
        "deep-gemm",
        ("sgl-deep-gemm",),
        (
            (">=2.11,<2.13", "sgl-deep-gemm==0.1.5.post1"),
            (">=2.13,<2.14", "sgl-deep-gemm==0.1.7"),
            (">=2.14,<2.16", "sgl-deep-gemm==0.2.5"),
        ),
        "FP8 products on Hopper",
        cuda=13,
    ),
    Wheel("humming", ("humming-kernels",), ((">=2.11,<2.16", "humming-kernels==0.1.19"),), "4- and 8-bit weights"),
    Wheel("nixl", ("nixl-cu13", "nixl"), ((">=2.11", "nixl-cu13==1.5.1"),), "KV transfer between nodes", cuda=13),
    Wheel(
        "mooncake",
        ("mooncake-transfer-engine-cuda13", "mooncake-transfer-engine-non-cuda", "mooncake-transfer-engine"),
        ((">=2.11", "mooncake-transfer-engine-cuda13==0.3.14"),),
        "a KV store outside the engine",
        cuda=13,
    ),
    Wheel(
        "opentelemetry",
        ("opentelemetry-exporter-otlp-proto-http",),
        ((">=2.11", "thalweg[otel]"),),
        "traces: --otlp-traces-endpoint",
        gpu=False,
    ),
)


def within(version: str, wanted: str | SpecifierSet) -> bool:
    """Whether a release lies in `wanted`, such as ">=2.11,<2.14". Local parts (+cpu) do not count."""
    return (SpecifierSet(wanted) if isinstance(wanted, str) else wanted).contains(version, prereleases=True)
