"""Gated delta networks for the numpy oracle, token by token as arXiv:2412.06464 writes them.

Role: the convolution, the recurrence, and the parts of a projection that stand by key head.
Owns: those formulas. Refuses: weights and layers, which are oracle.py's.
"""

from __future__ import annotations

import numpy as np

from oracle_reading import Array


def convolve(x: Array, taps: Array) -> Array:
    """x [n, c], taps [c, width] -> [n, c]: each channel sees width - 1 positions before, zeros at first."""
    width = taps.shape[1]
    padded = np.concatenate([np.zeros((width - 1, x.shape[1])), x])
    return sum((padded[j : j + len(x)] * taps[:, j] for j in range(width)), np.zeros_like(x))


def unit(x: Array) -> Array:
    """Vectors of length 1, but for what keeps zero from being divided by itself."""
    return np.asarray(x / np.sqrt((x * x).sum(axis=-1, keepdims=True) + 1e-6))


def gated_delta(q: Array, k: Array, v: Array, beta: Array, decay: Array) -> Array:
    """q, k [n, heads, key_dim], v [n, heads, value_dim], beta, decay [n, heads] -> [n, heads, value_dim]."""
    state = np.zeros((v.shape[1], k.shape[2], v.shape[2]))
    out = np.empty_like(v)
    for t in range(len(v)):
        state = state * decay[t, :, None, None]
        error = v[t] - np.einsum("hkv,hk->hv", state, k[t])
        state = state + np.einsum("hk,hv->hkv", k[t], error * beta[t, :, None])
        out[t] = np.einsum("hkv,hk->hv", state, q[t]) / np.sqrt(k.shape[2])
    return out


def by_key_head(x: Array, key_heads: int, sizes: tuple[int, ...]) -> list[Array]:
    """[n, key_heads x sum of sizes] -> for each size [n, key_heads x size]."""
    parts = np.split(x.reshape(len(x), key_heads, -1), np.cumsum(sizes)[:-1], axis=-1)
    return [part.reshape(len(x), -1) for part in parts]
