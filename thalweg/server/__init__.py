"""HTTP: the OpenAI routes, the native ones, metrics and the playground. Talks to the
engine through its client only.
"""
