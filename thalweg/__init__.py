"""Thalweg: an LLM inference engine, DeepSeek-first. `docs/architecture.md` shows the path of a token."""

__version__ = "0.1.0"
