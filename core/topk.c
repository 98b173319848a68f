/* topk.c: selection and sorting in place; nothing is allocated. */
#include "topk.h"

#include "../include/colibri.h"

#include <stdbool.h>
#include <stddef.h>

static inline bool better(const float *values, int32_t a, int32_t b) {
    const float x = values[a], y = values[b];
    if (x != x || y != y) return x == x || (y != y && a < b); /* a number beats NaN */
    return x > y || (x == y && a < b);
}

void topk_select(const float *values, int32_t n, int32_t k, int32_t *indices) {
    int32_t held = 0;
    for (int32_t i = 0; i < n; i++) {
        if (held == k && !better(values, i, indices[held - 1])) continue;
        int32_t at = held < k ? held++ : held - 1;
        for (; at > 0 && better(values, i, indices[at - 1]); at--) indices[at] = indices[at - 1];
        indices[at] = i;
    }
}

/* Heap sort: O(n log n) whatever the input. */
static void sift(const float *values, int32_t *indices, int32_t root, int32_t n) {
    for (int32_t child; (child = 2 * root + 1) < n; root = child) {
        if (child + 1 < n && better(values, indices[child], indices[child + 1])) child++; /* the worse child rises */
        if (!better(values, indices[root], indices[child])) return;
        const int32_t swap = indices[root];
        indices[root] = indices[child];
        indices[child] = swap;
    }
}

void topk_sort(const float *values, int32_t *indices, int32_t n) {
    for (int32_t root = n / 2 - 1; root >= 0; root--) sift(values, indices, root, n);
    for (int32_t end = n - 1; end > 0; end--) {
        const int32_t worst = indices[0];
        indices[0] = indices[end];
        indices[end] = worst;
        sift(values, indices, 0, end);
    }
}

int32_t colibri_topk_select(const float *values, int32_t n, int32_t k, int32_t *indices) {
    if (values == NULL || indices == NULL || k < 1 || k > n) return COLIBRI_ERROR_ARGUMENT;
    topk_select(values, n, k, indices);
    return COLIBRI_OK;
}
