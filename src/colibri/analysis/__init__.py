"""What `colibri bench` and `colibri profile` know: models of given shapes without a download, bytes and
operations of a token, the machine's bandwidth, speed in fresh processes, time by phase, layer and expert.

Owns: figures as data, with units in their names. Refuses: formats for people (cli/), and being needed by the
engine: nothing outside cli/ and benchmarks/ imports it.
"""
