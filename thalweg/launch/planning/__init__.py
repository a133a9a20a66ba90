"""`thalweg plan`: what a model needs, what a machine could do with it at best, and which layout suits a load. Nothing
is loaded.
"""
