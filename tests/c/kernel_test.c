/* kernel_test.c: every entry of every kernel table against the scalar one: equal bytes on random input, odd lengths,
 * unaligned rows and extreme values. Prints a line per kernel set; exit code 1 on the first difference.
 *
 *   kernel_test [--bench] [SET ...]
 *
 * Fails too where a SET named (avx2, neon …) cannot run here. With --bench also the rate of each kernel. */
#define _POSIX_C_SOURCE 200809L /* clock_gettime */
#include "kernel_bench.h"

#include <math.h>

static const struct kernels *tested;

static void compare(const char *what, const void *expected, const void *found, size_t bytes, int32_t n, int32_t k) {
    if (memcmp(expected, found, bytes) == 0) return;
    size_t at = 0;
    while (((const uint8_t *)expected)[at] == ((const uint8_t *)found)[at]) at++;
    fprintf(stderr, "%s: %s differs from scalar at byte %zu of %zu (n %d, k %d)\n", tested->name, what, at, bytes, n, k);
    exit(1);
}

static void compare_rows(const struct matrix *w) {
    for (int32_t r = 0; r < w->rows; r += 7) {
        float *const a = take((size_t)w->cols * 4 + 4), *const b = take((size_t)w->cols * 4 + 4);
        kernels_scalar.read_row(w, r, a + 1);
        tested->read_row(w, r, b + 1);
        compare("read_row", a, b, (size_t)w->cols * 4 + 4, r, w->cols);
        free(a);
        free(b);
    }
}

/* Rows of x and y on no boundary; all panels or all but the first; rows picked or in order, stored apart or by pointers. */
static void test_matmul(int type, int32_t rows, int32_t cols, int32_t n, enum content content) {
    static const char *const whats[N_CONTENTS] = {"matmul", "matmul, all highest", "matmul, all lowest", "matmul, jumping"};
    const struct matrix w = new_matrix(type, rows, cols, content);
    const size_t stride = activation_stride(type, cols), y_stride = (size_t)rows + 3, y_bytes = (y_stride * (size_t)n + 1) * 4;
    uint8_t *const x = take(stride * (size_t)n + 4);
    int32_t *const picked = take((size_t)n * 4);
    float *const expected = take(y_bytes), *const found = take(y_bytes), **const to = take((size_t)n * sizeof *to);
    const uint32_t variant = next_random();
    const bool pointers = variant & 4;
    fill_activations(type, x + 4, n, cols, content);
    for (int32_t t = 0; t < n; t++) picked[t] = n - 1 - t;
    struct matmul m = {.w = &w, .n_panels = matrix_panels(&w), .x = x + 4, .x_stride = stride, .n = n, .y_stride = y_stride};
    if (variant & 1) m.x_rows = picked;
    if (variant & 2 && m.n_panels > 1) m.first_panel = 1, m.n_panels--, m.y_panel = variant >> 3 & 1;
    if (pointers) m.y_rows = to;
    for (int side = 0; side < 2; side++) {
        m.y = (side == 0 ? expected : found) + 1;
        for (int32_t t = 0; pointers && t < n; t++) to[t] = m.y + y_stride * (size_t)picked[t];
        (side == 0 ? &kernels_scalar : tested)->matmul[type](&m);
    }
    compare(whats[content], expected, found, y_bytes, n, cols);
    compare_rows(&w);
    free_matrix(&w);
    free(x);
    free(picked);
    free(expected);
    free(found);
    free(to);
}

/* What a row holds when it is not finite must show: in all_finite, and in the scale of its group. */
static void test_not_finite(float *x, int32_t n) {
    const int32_t spoil = random_below(n), groups = (int32_t)q8_groups((size_t)n);
    uint8_t *const row = take(q8_row_bytes((size_t)n));
    fill(x, n, 2, ORDINARY);
    if (!tested->all_finite(x, n)) compare("all_finite", "y", "n", 1, n, 0);
    x[spoil] = next_random() % 2 ? NAN : -INFINITY;
    if (tested->all_finite(x, n)) compare("all_finite", "n", "y", 1, n, spoil);
    tested->quantize(x, n, 0, groups, row);
    if (!isnan(((const float *)(const void *)(row + q8_scales_at((size_t)n)))[spoil / Q8_GROUP])) {
        compare("quantize", "nan", "num", 3, n, spoil);
    }
    free(row);
}

static void test_rows(int32_t n, enum content content) {
    const size_t bytes = (size_t)n * 4, q8 = q8_row_bytes((size_t)n);
    float *const x = take(bytes + 8), *const w = take(bytes + 8), *const a = take(bytes + 8), *const b = take(bytes + 8);
    uint8_t *const qa = take(q8), *const qb = take(q8);
    fill(x + 1, n, 4, content); /* + 1: unaligned */
    fill(w + 1, n, 2, ORDINARY);
#define BOTH(what, call_a, call_b)             \
    do {                                       \
        memcpy(a + 1, x + 1, bytes);           \
        memcpy(b + 1, x + 1, bytes);           \
        kernels_scalar.call_a;                 \
        tested->call_b;                        \
        compare(what, a, b, bytes + 8, n, 0);  \
    } while (0)
    BOTH("rms_norm", rms_norm(a + 1, x + 1, w + 1, n, 1e-6f), rms_norm(b + 1, x + 1, w + 1, n, 1e-6f));
    BOTH("centre", centre(a + 1, x + 1, n), centre(b + 1, x + 1, n));
    BOTH("centre in place", centre(a + 1, a + 1, n), centre(b + 1, b + 1, n));
    BOTH("soft_cap", soft_cap(a + 1, 1.5f, n), soft_cap(b + 1, 1.5f, n));
    BOTH("rms_norm in place", rms_norm(a + 1, a + 1, w + 1, n, 1e-6f), rms_norm(b + 1, b + 1, w + 1, n, 1e-6f));
    BOTH("rms_norm without weights", rms_norm(a + 1, x + 1, NULL, n, 1e-6f), rms_norm(b + 1, x + 1, NULL, n, 1e-6f));
    BOTH("sigmoid_mul", sigmoid_mul(a + 1, w + 1, n), sigmoid_mul(b + 1, w + 1, n));
    BOTH("silu_mul", silu_mul(a + 1, w + 1, n, 0, 1, 0, 0), silu_mul(b + 1, w + 1, n, 0, 1, 0, 0));
    BOTH("silu_mul, clamped", silu_mul(a + 1, w + 1, n, 0.7f, 1.7f, 0.1f, 1), silu_mul(b + 1, w + 1, n, 0.7f, 1.7f, 0.1f, 1));
    BOTH("clamp from 0", clamp(a + 1, 0, INFINITY, n), clamp(b + 1, 0, INFINITY, n));
    BOTH("softmax", softmax(a + 1, n), softmax(b + 1, n));
    BOTH("add", add_scaled(a + 1, w + 1, 1, n), add_scaled(b + 1, w + 1, 1, n));
    BOTH("add_scaled", add_scaled(a + 1, w + 1, 0.37f, n), add_scaled(b + 1, w + 1, 0.37f, n));
    BOTH("clamp", clamp(a + 1, -1.5f, 1.5f, n), clamp(b + 1, -1.5f, 1.5f, n));
    BOTH("rotate", rotate(a + 1, w + 1, w + 1 + n / 2, n / 2 * 2), rotate(b + 1, w + 1, w + 1 + n / 2, n / 2 * 2));
#undef BOTH
    int32_t best = 0;
    for (int32_t i = 1; i < n; i++) best = x[1 + i] > x[1 + best] ? i : best;
    if (tested->argmax(x + 1, n) != best && !isnan(tested->dot(x + 1, x + 1, n))) compare("argmax", "n", "y", 1, n, best);
    const int32_t groups = (int32_t)q8_groups((size_t)n), first = random_below(groups);
    kernels_scalar.quantize(x + 1, n, 0, groups, qa);
    tested->quantize(x + 1, n, 0, first, qb);
    tested->quantize(x + 1 + first * Q8_GROUP, n, first, groups - first, qb);
    compare("quantize", qa, qb, q8, n, first);
    const float dots[2] = {kernels_scalar.dot(x + 1, w + 1, n), tested->dot(x + 1, w + 1, n)};
    if (!isnan(dots[0]) || !isnan(dots[1])) compare("dot", &dots[0], &dots[1], 4, n, 0);
    for (int32_t i = 0; i < n; i++) {
        const float e[2] = {kernels_scalar.exp(x[1 + i] * 30), tested->exp(x[1 + i] * 30)};
        compare("exp", &e[0], &e[1], 4, n, i);
    }
    test_not_finite(w + 1, n);
    free(x);
    free(w);
    free(a);
    free(b);
    free(qa);
    free(qb);
}

/* Block by block and merged: the same bits as in one go. */
static void test_attend_blocks(const struct attend *whole, int32_t blocks, float *const *expected, float *const *found) {
    const size_t floats = attend_partial_floats(whole->value_dim);
    float *const partials = take(floats * (size_t)blocks * (size_t)whole->n * 4);
    struct attend job = *whole;
    for (int32_t block = blocks - 1; block >= 0; block--) {
        for (int32_t j = 0; j < job.n; j++) job.partial[j] = partials + ((size_t)j * (size_t)blocks + (size_t)block) * floats;
        tested->attend(&job, block);
    }
    for (int32_t j = 0; j < job.n; j++) {
        const float *const first = partials + (size_t)j * (size_t)blocks * floats;
        const int32_t begin = job.first_key[j] / KV_BLOCK;
        tested->attend_merge(first + (size_t)begin * floats, (job.n_keys[j] - 1) / KV_BLOCK + 1 - begin, job.value_dim,
                             job.sink[j], found[j] + 1);
        compare("attend by blocks", expected[j], found[j], (size_t)job.value_dim * 4 + 4, j, job.n_keys[j]);
    }
    free(partials);
}

/* NaN into the keys and values of every position before the first that any query sees. */
static void spoil(uint8_t *block, size_t at, bool half) {
    static const uint16_t nan_half = 0x7e00;
    static const float nan_float = NAN;
    if (half) memcpy(block + at * sizeof nan_half, &nan_half, sizeof nan_half);
    else memcpy(block + at * sizeof nan_float, &nan_float, sizeof nan_float);
}

static void spoil_unseen(const struct attend *job, uint8_t *pool) {
    int32_t first = INT32_MAX;
    for (int32_t j = 0; j < job->n; j++) first = job->first_key[j] < first ? job->first_key[j] : first;
    for (int32_t key = 0; key < first; key++) {
        uint8_t *const block = pool + (size_t)job->table[key / KV_BLOCK] * job->block_bytes;
        const size_t at = (size_t)(key % KV_BLOCK);
        for (size_t d = 0; d < (size_t)job->key_dim; d++) spoil(block, (at / 16 * (size_t)job->key_dim + d) * 16 + at % 16, job->half);
        for (size_t d = 0; d < (size_t)job->value_dim; d++) {
            spoil(block + job->v_offset, (d / 16 * KV_BLOCK + at) * 16 + d % 16, job->half);
        }
    }
}

/* Keys and values; halves are cut from floats of a size that both have, else 0. */
static void fill_pool(uint8_t *pool, size_t count, bool half, enum content content) {
    float *const from = half ? take(count * sizeof *from) : (float *)(void *)pool;
    fill(from, (int32_t)count, 2, content == JUMPING ? ORDINARY : content);
    for (size_t i = 0; half && i < count; i++) {
        uint32_t bits;
        memcpy(&bits, &from[i], sizeof bits);
        const uint32_t size = bits & 0x7fffffff, fits = size >= 113u << 23 && size < 142u << 23;
        const uint16_t number = (uint16_t)((bits >> 16 & 0x8000) | (fits ? (size - (112u << 23)) >> 13 : size >> 13 & 0x3ff));
        memcpy(pool + i * sizeof number, &number, sizeof number);
    }
    if (half) free(from);
}

static void test_attend(int32_t head_dim, int32_t keys, int32_t n, enum content content) {
    const int32_t stride = (head_dim + 15) & ~15, blocks = (keys + KV_BLOCK - 1) / KV_BLOCK;
    const bool half = next_random() % 2;
    const size_t number = half ? 2 : 4, block_bytes = (size_t)KV_BLOCK * (size_t)(head_dim + stride) * number;
    uint8_t *const pool = take(block_bytes * (size_t)blocks);
    int32_t table[16];
    float *q[ATTEND_TILE], *a[ATTEND_TILE], *b[ATTEND_TILE], sinks[ATTEND_TILE], biases[2 * 200 + 1];
    const int32_t span = next_random() % 2 ? 0 : 8 + random_below(193);
    const bool sink = next_random() % 2;
    const int32_t window = next_random() % 2 ? 0 : 1 + random_below(keys);
    fill_pool(pool, block_bytes / number * (size_t)blocks, half, content);
    for (int32_t i = 0; i < blocks; i++) table[i] = blocks - 1 - i;
    struct attend job = {.n = n, .pool = pool, .half = half, .table = table, .block_bytes = block_bytes, .k_offset = 0,
                         .v_offset = (size_t)KV_BLOCK * (size_t)head_dim * number, .key_dim = head_dim,
                         .value_dim = head_dim, .block_positions = KV_BLOCK, .bias_span = span,
                         .scale = content == JUMPING ? 50 : 0.3f}; /* 50: weights from 1 to the smallest exp gives */
    fill(biases, 2 * span + 1, 3, ORDINARY);
    for (int32_t j = 0; j < n; j++) {
        q[j] = take((size_t)head_dim * 4 + 4);
        a[j] = take((size_t)head_dim * 4 + 4);
        b[j] = take((size_t)head_dim * 4 + 4);
        fill(q[j] + 1, head_dim, 1, ORDINARY);
        job.q[j] = q[j] + 1;
        const int32_t seen = keys - (n - 1 - j) * random_below(40);
        job.n_keys[j] = seen > 0 ? seen : 1;
        job.first_key[j] = window > 0 && window < job.n_keys[j] ? job.n_keys[j] - window : 0;
        job.bias[j] = biases + span;
        job.position[j] = random_below(keys);
        sinks[j] = random_float(content == JUMPING ? 200 : 3);
        if (sink) job.sink[j] = &sinks[j];
    }
    for (int32_t j = 0; j < n; j++) job.out[j] = a[j] + 1;
    kernels_scalar.attend(&job, -1);
    for (int32_t j = 0; j < n; j++) job.out[j] = b[j] + 1;
    tested->attend(&job, -1);
    for (int32_t j = 0; j < n; j++) compare("attend", a[j], b[j], (size_t)head_dim * 4 + 4, n, keys);
    for (int32_t j = 0; j < n; j++) { /* alone: the tile must not matter */
        struct attend single = job;
        single.n = 1;
        single.q[0] = q[j] + 1;
        single.out[0] = b[j] + 1;
        single.n_keys[0] = job.n_keys[j];
        single.first_key[0] = job.first_key[j];
        single.sink[0] = job.sink[j];
        single.bias[0] = job.bias[j];
        single.position[0] = job.position[j];
        tested->attend(&single, -1);
        compare("attend alone", a[j], b[j], (size_t)head_dim * 4 + 4, j, keys);
    }
    test_attend_blocks(&job, blocks, a, b);
    spoil_unseen(&job, pool);
    tested->attend(&job, -1);
    for (int32_t j = 0; j < n; j++) compare("attend beside NaN", a[j], b[j], (size_t)head_dim * 4 + 4, n, keys);
    for (int32_t j = 0; j < n; j++) {
        free(q[j]);
        free(a[j]);
        free(b[j]);
    }
    free(pool);
}

/* All rows at once by the scalar set, in two calls by the other: the state between them must carry everything. */
static void test_convolve(int32_t cols, int32_t width, int32_t n, enum content content) {
    const size_t stride = (size_t)cols + 3, bytes = stride * (size_t)n * 4, past_bytes = (size_t)cols * (size_t)(width - 1) * 4;
    const int32_t first = random_below(n + 1);
    const bool silu = next_random() % 2;
    float *const w = take(stride * (size_t)width * 4), *const x = take(bytes + 4), *const y = take(bytes + 4);
    float *const past = take(past_bytes + 4), *const other = take(past_bytes + 4);
    fill(w, (int32_t)stride * width, 1, ORDINARY);
    fill(x + 1, (int32_t)stride * n, 2, content == JUMPING ? ORDINARY : content);
    fill(past + 1, cols * (width - 1), 2, ORDINARY);
    memcpy(y, x, bytes + 4);
    memcpy(other, past, past_bytes + 4);
    kernels_scalar.convolve(x + 1, stride, n, cols, w, stride, width, past + 1, silu);
    tested->convolve(y + 1, stride, first, cols, w, stride, width, other + 1, silu);
    tested->convolve(y + 1 + stride * (size_t)first, stride, n - first, cols, w, stride, width, other + 1, silu);
    compare("convolve", x, y, bytes + 4, n, cols);
    compare("convolve, what it keeps", past, other, past_bytes + 4, n, cols);
    free(w);
    free(x);
    free(y);
    free(past);
    free(other);
}

static void test_delta(int32_t key_dim, int32_t value_dim, int32_t n, enum content content) {
    const size_t stride = (size_t)(2 * key_dim + value_dim) + 3, bytes = (stride * (size_t)n + 1) * 4;
    const size_t state_bytes = (size_t)((value_dim + 15) & ~15) * (size_t)key_dim * 4;
    const int32_t first = random_below(n + 1);
    float *const x = take(bytes), *const y = take(bytes), *const held = take(state_bytes), *const other = take(state_bytes);
    fill(x + 1, (int32_t)stride * n, 1, content == JUMPING ? ORDINARY : content);
    for (int32_t row = 0; row < n; row++) fill(x + 1 + stride * (size_t)row, 2, content == JUMPING ? 120 : 3, ORDINARY); /* the gates */
    memcpy(y, x, bytes);
    const float rate = random_float(3), bias = random_float(2);
    const struct delta whole = {n, key_dim, value_dim, x + 3, x + 3 + key_dim, x + 3 + 2 * key_dim, x + 1, x + 2, stride, rate, bias, held};
    const struct delta begin = {first, key_dim, value_dim, y + 3, y + 3 + key_dim, y + 3 + 2 * key_dim, y + 1, y + 2, stride, rate, bias,
                                other};
    struct delta rest = begin;
    const size_t at = stride * (size_t)first;
    rest.n = n - first, rest.q += at, rest.k += at, rest.v += at, rest.beta += at, rest.decay += at;
    kernels_scalar.delta(&whole);
    tested->delta(&begin);
    tested->delta(&rest);
    compare("delta", x, y, bytes, n, value_dim);
    compare("delta, state", held, other, state_bytes, n, value_dim);
    free(x);
    free(y);
    free(held);
    free(other);
}

static void test_set(void) {
    static const int types[] = {TYPE_F32, TYPE_BF16, TYPE_Q8, TYPE_Q4, TYPE_Q6, TYPE_MXFP4};
    static const int32_t edges[] = {63, 64, 65, 255, 256, 257, 287, 288, 289, 511, 512, 513}; /* groups, super-groups */
    enum { N_TYPES = 6, N_EDGES = sizeof edges / sizeof *edges, SHORT = 40 };
    int32_t turn = 0;
    for (int32_t cols = 1; cols <= SHORT + N_EDGES; cols++) {
        for (int t = 0; t < N_TYPES; t++, turn++) {
            test_matmul(types[t], 1 + random_below(70), cols <= SHORT ? cols : edges[cols - SHORT - 1], 1 + turn / N_TYPES % 20,
                        (enum content)((turn / N_TYPES + turn / N_TYPES / 20 + t) % N_CONTENTS));
        }
        test_rows(cols <= SHORT ? cols : edges[cols - SHORT - 1], (enum content)(cols % N_CONTENTS));
    }
    for (int round = 0; round < 120; round++) {
        const enum content content = (enum content)(round / N_TYPES % N_CONTENTS);
        test_matmul(types[round % N_TYPES], 1 + random_below(90), 1 + random_below(700), 1 + random_below(20), content);
        test_rows(1 + random_below(300), content);
        test_attend(1 + random_below(80), 1 + random_below(700), 1 + round % ATTEND_TILE, content);
        test_convolve(1 + random_below(90), 1 + round % 5, 1 + random_below(9), content);
        test_delta(1 + random_below(70), 1 + random_below(150), 1 + random_below(9), content);
    }
}

int main(int argc, char **argv) {
    const int first_name = argc > 1 && strcmp(argv[1], "--bench") == 0 ? 2 : 1;
    int named = 0; /* how many of the sets named were compared */
    bool usable;
    setvbuf(stdout, NULL, _IOLBF, 0);
    for (int i = 0; (tested = kernels_list(i, &usable)) != NULL; i++) {
        if (!usable) {
            printf("%-12s not on this machine\n", tested->name);
            continue;
        }
        test_set();
        printf(tested == &kernels_scalar ? "%-12s same bytes twice\n" : "%-12s same bytes as scalar\n", tested->name);
        for (int a = first_name; a < argc; a++) named += strcmp(argv[a], tested->name) == 0;
        if (first_name == 2) bench_set(tested);
    }
    if (named == argc - first_name) return 0;
    fprintf(stderr, "only %d of the %d sets named could be compared\n", named, argc - first_name);
    return 1;
}
