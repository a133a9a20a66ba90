"""The simulated device, without torch or GPU. The real `Scheduler`, `Loop` and page allocator drive it, with small
pages.

The device has the true state, answers late, and runs p pipeline stages. KV is a hash of the prefix, so every read
checks that the page holds what it should. `mixes.py` draws random mixes of requests and compares each with a sequential
decoder; `bugs.py` plants bugs that the checks must find.
"""
