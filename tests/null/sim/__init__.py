"""The simulated device: no torch, no GPU. The real `Scheduler`, the real `Loop` and the real allocator drive it, with small
pages.

The device has the truth, answers late, and runs p pipeline stages that hear of new tokens late too. KV is a hash of the
prefix, so every read finds out whether the page holds what it should. `mixes.py` draws random mixes of requests and
compares each with a sequential decoder; `bugs.py` plants bugs that the checks must catch.
"""
