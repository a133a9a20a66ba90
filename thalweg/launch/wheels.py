"""Optional libraries that `thalweg doctor` knows: their use, and which release loads on which torch, which pip's
markers cannot say.
"""

from __future__ import annotations

from dataclasses import dataclass

from packaging.specifiers import SpecifierSet


@dataclass(frozen=True, slots=True)
class Wheel:
    """A library that is never required."""

    title: str
    name: str  # of the distribution
    module: str  # that Thalweg imports
    use: str
    pins: tuple[tuple[str, str], ...]  # (torch versions, requirement), the first that fits counts
    cuda: int = 0  # CUDA major that its binary needs; 0: it needs no GPU
    loose_below: str = ""  # below this torch its metadata asks for more than it needs, so pip must not check it

    def requirement(self, torch: str) -> str:
        """The requirement to install for this torch, "" where no release loads on it."""
        return next((pin for versions, pin in self.pins if within(torch, versions)), "")

    def command(self, torch: str) -> str:
        loose = "--no-deps " if self.loose_below and not within(torch, f">={self.loose_below}") else ""
        return f"pip install {loose}'{self.requirement(torch)}'"


DEEP_GEMM = "sgl-deep-gemm"

# Which symbols the binaries need was compared with those that torch 2.11 to 2.15 export.
WHEELS = (
    Wheel(
        "flash-mla",
        "sgl-flash-mla",
        "flash_mla",
        "MLA decode and sparse attention on Hopper",
        ((">=2.10,<2.16", "sgl-flash-mla==1.0.0"),),
        cuda=13,
        loose_below="2.14.1",
    ),
    Wheel(
        "fa3",
        "fa3-fwd",
        "fa3_fwd_interface",
        "prefill attention on Hopper",
        ((">=2.11,<2.16", "fa3-fwd==0.0.3"),),
        cuda=13,
    ),
    Wheel(
        "deep-gemm",
        DEEP_GEMM,
        "deep_gemm",
        "FP8 products on Hopper",
        (
            (">=2.11,<2.13", "sgl-deep-gemm==0.1.5.post1"),
            (">=2.13,<2.14", "sgl-deep-gemm==0.1.7"),
            (">=2.14,<2.16", "sgl-deep-gemm==0.2.5"),
        ),
        cuda=13,
    ),
    Wheel(
        "flashinfer",
        "flashinfer-python",
        "flashinfer",
        "attention on Hopper, only by --attention-backend flashinfer",
        ((">=2.11", "flashinfer-python"),),
        cuda=13,
    ),
    Wheel(
        "opentelemetry",
        "opentelemetry-exporter-otlp-proto-http",
        "opentelemetry",
        "traces: --otlp-traces-endpoint",
        ((">=2.11", "thalweg[otel]"),),
    ),
)


def within(version: str, wanted: str | SpecifierSet) -> bool:
    """Whether a release lies in `wanted`, such as ">=2.11,<2.14". Local parts (+cpu) do not count."""
    return (SpecifierSet(wanted) if isinstance(wanted, str) else wanted).contains(version, prereleases=True)
