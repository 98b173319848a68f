"""Experts that a checkpoint stores as MXFP4: 32 columns of 4-bit floats share a power of two.

Owns: the bytes of *_blocks and *_scales, to panels of type mxfp4 (docs/FORMAT.md, section 4) without loss
or to float32. Refuses: scales that f32 cannot hold. arXiv:2310.10537
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from colibri.errors import ConversionError
from colibri.panels import MXFP4_LARGEST, MXFP4_VALUES
from colibri.quantize import PANEL_ROWS

Bytes = npt.NDArray[np.uint8]
_SCALES = 4  # groups whose scales lie together


def panels(block: Bytes, name: str, first_row: int) -> memoryview:
    """Panels from rows [n, groups, 17]: 16 bytes of two elements each, low half first, and the scale."""
    _refuse_scales(block, name, first_row)
    n, groups = -(-len(block) // PANEL_ROWS), block.shape[1]
    padded = np.zeros((n * PANEL_ROWS, groups, 17), np.uint8)
    padded[: len(block)] = block
    pairs = padded[..., :16]
    elements = np.stack([pairs & 15, pairs >> 4], axis=-1).reshape(n, PANEL_ROWS, groups, 2, 4, 4)
    low, high = elements[:, :, :, 0], elements[:, :, :, 1]  # [n, row, group, run, byte]
    quants = (low | high << 4).transpose(0, 2, 3, 1, 4).reshape(n, -1)
    scales = np.zeros((n, PANEL_ROWS, -(-groups // _SCALES) * _SCALES), np.uint8)
    scales[..., :groups] = padded[..., 16].reshape(n, PANEL_ROWS, groups)
    in_fours = scales.reshape(n, PANEL_ROWS, -1, _SCALES).transpose(0, 2, 1, 3).reshape(n, -1)
    return np.concatenate([quants, in_fours], axis=1).reshape(-1).data


def widen(block: Bytes, name: str, first_row: int) -> npt.NDArray[np.float32]:
    """float32 [n, groups x 32] of such rows, exactly."""
    _refuse_scales(block, name, first_row)
    pairs = block[..., :16]
    values = np.array(MXFP4_VALUES, np.float32)[np.stack([pairs & 15, pairs >> 4], axis=-1)]
    values = values.reshape(*block.shape[:2], 32)
    return np.ldexp(values, block[..., 16:].astype(np.int32) - 127).reshape(len(block), -1)


def _refuse_scales(block: Bytes, name: str, first_row: int) -> None:
    wrong = np.argwhere(block[..., 16] > MXFP4_LARGEST)
    if len(wrong):
        row, group = (int(i) for i in wrong[0])
        raise ConversionError(
            f"{name}[{first_row + row}]: the scale of group {group} is {block[row, group, 16]}, "
            f"expected at most {MXFP4_LARGEST}. The checkpoint is damaged; download it again."
        )
