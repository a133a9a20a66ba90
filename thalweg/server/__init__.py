"""HTTP: the OpenAI routes, the native ones, metrics and the playground. Knows the front, messages and text; never the
engine's inside.
"""
