"""The columns of the slots' integers and floats, as Triton kernels name them."""

from __future__ import annotations

from triton.language import constexpr

from thalweg.kernels.build_inputs.ref import FLOATS, INTS

LENGTH, NUM_COMPUTED, END, SEED, PROMPT_LEN, MIN_LEN, TOP_K, NUM_DRAFTS = map(constexpr, range(len(INTS)))
TEMPERATURE, TOP_P, MIN_P, REPETITION, FREQUENCY, PRESENCE = map(constexpr, range(len(FLOATS)))
INT_COLUMNS, FLOAT_COLUMNS = constexpr(len(INTS)), constexpr(len(FLOATS))
