"""What `colibri plan`, `bench` and `profile` know: models of given shapes without a download, bytes and
operations of a token, the bandwidth of memory and disk, what a model will take, speed in fresh processes,
time by phase, layer and expert; what routers do with texts (measures.py).

Owns: figures as data, with units in their names. Refuses: formats for people (cli/), and being needed by the
engine: nothing but cli/, benchmarks/ and the public name colibri.plan imports it.
"""
