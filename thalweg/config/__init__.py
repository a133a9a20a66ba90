"""Options (one tree of frozen dataclasses, from which the command line is made), facts of the model and of the machine,
catalogs of backends and drafters.
"""
