/* topk.h: the best few of many values: experts of a token, candidates of a draw. Descending, ties to the lowest index,
 * NaN last: a total order, so that the answer is one and the same everywhere. */
#pragma once

#include <stdint.h>

/* indices [k] of the k best of values [n], best first. 1 <= k <= n. */
void topk_select(const float *values, int32_t n, int32_t k, int32_t *indices);
/* Sorts indices [n] by their values, best first. */
void topk_sort(const float *values, int32_t *indices, int32_t n);
