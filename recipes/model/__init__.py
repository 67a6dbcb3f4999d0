"""The steps from the sections of a recipe to this rank's shards of a model, which ``recipes/trainable.py`` calls.

``request`` (what to build), ``model_config`` (the configuration of the files), ``unsharded`` (a model on the meta
device), ``changes`` (vocabulary, adapters, frozen parameters), ``sharding`` (the shards of this rank), ``probes`` (what
the model supports), and ``additions`` (what training adds to its forward pass).
"""
