"""One module per family of checkpoints, named after its model_type; registry.py finds them by MODEL_TYPES.

A family module is plain data and one function: MODEL_TYPES, ARCHITECTURES, EOS_DEFAULT (ids that its config
class in Transformers assumes), TENSORS (target entry to source names), EXPERTS (or None), read_config(keys)
-> Decoder.
"""
