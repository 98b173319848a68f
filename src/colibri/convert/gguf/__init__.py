"""GGUF files as sources of a conversion: container, block types, vocabulary, architectures.

Owns: nothing itself. A GGUF file presents itself as the checkpoint that a Hugging Face directory would be, so
that everything behind it is one mechanism.
"""
