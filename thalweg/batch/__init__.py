"""Request state on the device (`Slots`), what a model is given (`Batch`), and `prepare`, which makes the one from the
other.
"""
