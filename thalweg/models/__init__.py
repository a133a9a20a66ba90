"""One file per architecture family, and the catalog. A model reads like the paper and knows nothing of requests, ranks
or graphs.
"""
