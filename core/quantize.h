/* quantize.h: float matrices to the panels that the kernels read (docs/FORMAT.md §4). Used when a model is converted,
 * never while it runs. */
#ifndef COLIBRI_QUANTIZE_H
#define COLIBRI_QUANTIZE_H

#include "status.h"

/* colibri_quantize of colibri.h. Panels are independent: any multiple of 16 rows may be packed by itself. */
int32_t quantize_matrix(int32_t type, int32_t rows, int32_t cols, const float *weights, const float *importance,
                        void *packed, uint64_t packed_bytes, colibri_error *error);

#endif
