/* kernel_test.c: every entry of every kernel table against the scalar one: equal bytes on random input, odd lengths,
 * unaligned rows and extreme values. Prints a line per kernel set; exit code 1 on the first difference.
 * With --bench also the rate of each matrix product. */
#define _POSIX_C_SOURCE 200809L /* clock_gettime */
#include "../../core/kernels/kernels.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

static uint64_t state = 88172645463325252u;

static uint32_t next_random(void)
{
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    return (uint32_t)(state >> 32);
}

static float random_float(float scale)
{
    return ((float)next_random() / 2147483648.0f - 1.0f) * scale;
}

/* Mostly ordinary numbers; now and then an extreme one. */
static void fill(float *x, int32_t n, float scale, bool extremes)
{
    static const float odd[] = {0.0f, -0.0f, 1e-40f, -1e-44f, 3e38f, -3e38f, 1e-30f, 65504.0f, 127.0f, -127.5f};
    for (int32_t i = 0; i < n; i++) {
        x[i] = random_float(scale);
        if (extremes && next_random() % 7 == 0) x[i] = odd[next_random() % (sizeof odd / sizeof *odd)];
    }
}

static void *take(size_t bytes)
{
    void *const memory = aligned_alloc(64, (bytes + 127) & ~(size_t)63);
    if (memory == NULL) abort();
    memset(memory, 0, (bytes + 127) & ~(size_t)63);
    return memory;
}

static const struct kernels *tested;

static void compare(const char *what, const void *expected, const void *found, size_t bytes, int32_t n, int32_t k)
{
    if (memcmp(expected, found, bytes) == 0) return;
    size_t at = 0;
    while (((const uint8_t *)expected)[at] == ((const uint8_t *)found)[at]) at++;
    fprintf(stderr, "%s: %s differs from scalar at byte %zu of %zu (n %d, k %d)\n", tested->name, what, at, bytes, n, k);
    exit(1);
}

/* Any bytes are a q4 panel, but for the f16 scales: those stay finite. */
static void random_q4_panel(uint8_t *panel, size_t groups)
{
    for (size_t i = 0; i < groups * 256; i++) panel[i] = next_random() % 9 == 0 ? 255 : (uint8_t)next_random();
    for (size_t s = 0; s < (groups + Q4_SUPER - 1) / Q4_SUPER; s++) {
        uint8_t *const scales = panel + (groups + s) * 256;
        for (size_t i = 0; i < 32; i++) {
            const uint16_t half = (uint16_t)(next_random() % 11 == 0 ? next_random() % 0x400 : 0x1000 + next_random() % 0x1000);
            memcpy(scales + i * 2, &half, 2);
        }
        for (size_t i = 64; i < 256; i++) scales[i] = (uint8_t)next_random();
    }
}

/* A random matrix of any type, padding as the writer leaves it. */
static struct matrix random_matrix(int type, int32_t rows, int32_t cols)
{
    const size_t bytes = panel_bytes(type, (uint64_t)cols), panels = (size_t)(rows + 15) / 16;
    uint8_t *const data = take(bytes * panels);
    for (size_t p = 0; p < panels; p++) {
        uint8_t *const panel = data + p * bytes;
        if (type == TYPE_Q4) {
            random_q4_panel(panel, q8_groups((size_t)cols));
            continue;
        }
        for (int32_t k = 0; k < cols; k++) {
            for (int32_t r = 0; r < 16; r++) {
                float x = random_float(0.5f);
                const size_t q_at = (size_t)(k / 32) * 512 + (size_t)(k % 32 / 4) * 64 + (size_t)r * 4 + (size_t)(k % 4);
                if (type == TYPE_F32) memcpy(panel + (size_t)k * 64 + (size_t)r * 4, &x, 4);
                else if (type == TYPE_BF16) memcpy(panel + (size_t)(k / 2) * 64 + (size_t)r * 4 + (size_t)(k % 2) * 2, (uint8_t *)&x + 2, 2);
                else panel[q_at] = next_random() % 9 == 0 ? (next_random() % 2 ? 1 : 255) : (uint8_t)(1 + next_random() % 255);
            }
        }
        if (type != TYPE_Q8) continue;
        for (size_t g = 0; g < q8_groups((size_t)cols); g++) {
            for (size_t k = (size_t)cols; k < (g + 1) * 32; k++) {
                for (size_t r = 0; r < 16; r++) panel[k / 32 * 512 + k % 32 / 4 * 64 + r * 4 + k % 4] = 128;
            }
            for (size_t r = 0; r < 16; r++) {
                const uint16_t half = (uint16_t)(next_random() % 11 == 0 ? next_random() % 0x400 : 0x1000 + next_random() % 0x1000);
                memcpy(panel + q8_groups((size_t)cols) * 512 + g * 32 + r * 2, &half, 2);
            }
        }
    }
    return (struct matrix){data, rows, cols, (uint8_t)type};
}

static void test_matmul(int type, int32_t rows, int32_t cols, int32_t n)
{
    const struct matrix w = random_matrix(type, rows, cols);
    const size_t stride = type_reads_q8(type) ? q8_row_bytes((size_t)cols) : (size_t)cols * 4 + 4; /* unaligned f32 rows */
    uint8_t *const x = take(stride * (size_t)n);
    int32_t *const picked = take((size_t)n * 4);
    float *const row = take((size_t)cols * 4);
    for (int32_t t = 0; t < n; t++) {
        fill(row, cols, 3, false);
        if (type_reads_q8(type)) tested->quantize(row, cols, 0, (int32_t)q8_groups((size_t)cols), x + stride * (size_t)t);
        else memcpy(x + stride * (size_t)t, row, (size_t)cols * 4);
        picked[t] = n - 1 - t;
    }
    const size_t y_bytes = ((size_t)rows + 3) * (size_t)n * 4;
    float *const expected = take(y_bytes), *const found = take(y_bytes);
    struct matmul m = {.w = &w, .n_panels = matrix_panels(&w), .x = x, .x_stride = stride, .x_rows = picked, .n = n,
                       .y_stride = (size_t)rows + 3};
    m.y = expected;
    kernels_scalar.matmul[type](&m);
    m.y = found;
    tested->matmul[type](&m);
    compare("matmul", expected, found, y_bytes, n, cols);
    for (int32_t r = 0; r < rows; r += 7) {
        float *const a = take((size_t)cols * 4), *const b = take((size_t)cols * 4);
        kernels_scalar.read_row(&w, r, a);
        tested->read_row(&w, r, b);
        compare("read_row", a, b, (size_t)cols * 4, r, cols);
        free(a);
        free(b);
    }
    free((void *)(uintptr_t)w.data);
    free(x);
    free(picked);
    free(row);
    free(expected);
    free(found);
}

static void test_rows(int32_t n, bool extremes)
{
    const size_t bytes = (size_t)n * 4, q8 = q8_row_bytes((size_t)n);
    float *const x = take(bytes + 8), *const w = take(bytes + 8), *const a = take(bytes + 8), *const b = take(bytes + 8);
    uint8_t *const qa = take(q8), *const qb = take(q8);
    fill(x + 1, n, 4, extremes); /* + 1: unaligned */
    fill(w + 1, n, 2, false);
#define BOTH(what, call_a, call_b)             \
    do {                                       \
        memcpy(a + 1, x + 1, bytes);           \
        memcpy(b + 1, x + 1, bytes);           \
        kernels_scalar.call_a;                 \
        tested->call_b;                        \
        compare(what, a, b, bytes + 8, n, 0);  \
    } while (0)
    BOTH("rms_norm", rms_norm(a + 1, x + 1, w + 1, n, 1e-6f), rms_norm(b + 1, x + 1, w + 1, n, 1e-6f));
    BOTH("silu_mul", silu_mul(a + 1, w + 1, n), silu_mul(b + 1, w + 1, n));
    BOTH("softmax", softmax(a + 1, n), softmax(b + 1, n));
    BOTH("add", add(a + 1, w + 1, n), add(b + 1, w + 1, n));
    BOTH("add_scaled", add_scaled(a + 1, w + 1, 0.37f, n), add_scaled(b + 1, w + 1, 0.37f, n));
    BOTH("clamp", clamp(a + 1, 1.5f, n), clamp(b + 1, 1.5f, n));
    BOTH("rotate", rotate(a + 1, w + 1, w + 1 + n / 2, n / 2 * 2), rotate(b + 1, w + 1, w + 1 + n / 2, n / 2 * 2));
#undef BOTH
    const int32_t groups = (int32_t)q8_groups((size_t)n);
    kernels_scalar.quantize(x + 1, n, 0, groups, qa);
    tested->quantize(x + 1, n, 0, groups, qb);
    compare("quantize", qa, qb, q8, n, 0);
    const float dots[2] = {kernels_scalar.dot(x + 1, w + 1, n), tested->dot(x + 1, w + 1, n)};
    if (!isnan(dots[0]) || !isnan(dots[1])) compare("dot", &dots[0], &dots[1], 4, n, 0);
    for (int32_t i = 0; i < n; i++) {
        const float e[2] = {kernels_scalar.exp(x[1 + i] * 30), tested->exp(x[1 + i] * 30)};
        compare("exp", &e[0], &e[1], 4, n, i);
    }
    const int32_t spoil = (int32_t)(next_random() % (uint32_t)n);
    if (!tested->all_finite(w + 1, n)) compare("all_finite", "y", "n", 1, n, 0);
    w[1 + spoil] = next_random() % 2 ? NAN : -INFINITY;
    if (tested->all_finite(w + 1, n)) compare("all_finite", "n", "y", 1, n, spoil);
    tested->quantize(w + 1, n, 0, groups, qb);
    if (!isnan(((const float *)(const void *)(qb + q8_scales_at((size_t)n)))[spoil / 32])) compare("quantize", "nan", "num", 3, n, spoil);
    free(x);
    free(w);
    free(a);
    free(b);
    free(qa);
    free(qb);
}

static void test_attend(int32_t head_dim, int32_t keys, int32_t n)
{
    const int32_t stride = (head_dim + 15) & ~15, blocks = (keys + KV_BLOCK - 1) / KV_BLOCK;
    const size_t block_bytes = (size_t)KV_BLOCK * (size_t)(head_dim + stride) * 4;
    uint8_t *const pool = take(block_bytes * (size_t)blocks);
    int32_t table[16];
    float *q[ATTEND_TILE], *a[ATTEND_TILE], *b[ATTEND_TILE];
    fill((float *)(void *)pool, (int32_t)(block_bytes / 4) * blocks, 2, false);
    for (int32_t i = 0; i < blocks; i++) table[i] = blocks - 1 - i;
    struct attend job = {.n = n, .pool = pool, .table = table, .block_bytes = block_bytes, .k_offset = 0,
                         .v_offset = (size_t)KV_BLOCK * (size_t)head_dim * 4, .head_dim = head_dim, .scale = 0.3f};
    for (int32_t j = 0; j < n; j++) {
        q[j] = take((size_t)head_dim * 4);
        a[j] = take((size_t)head_dim * 4);
        b[j] = take((size_t)head_dim * 4);
        fill(q[j], head_dim, 1, false);
        job.q[j] = q[j];
        const int32_t seen = keys - (n - 1 - j) * (int32_t)(next_random() % 40);
        job.n_keys[j] = seen > 0 ? seen : 1;
    }
    for (int32_t j = 0; j < n; j++) job.out[j] = a[j];
    kernels_scalar.attend(&job);
    for (int32_t j = 0; j < n; j++) job.out[j] = b[j];
    tested->attend(&job);
    for (int32_t j = 0; j < n; j++) compare("attend", a[j], b[j], (size_t)head_dim * 4, n, keys);
    for (int32_t j = 0; j < n; j++) { /* alone: the tile must not matter */
        struct attend single = job;
        single.n = 1;
        single.q[0] = q[j];
        single.out[0] = b[j];
        single.n_keys[0] = job.n_keys[j];
        tested->attend(&single);
        compare("attend alone", a[j], b[j], (size_t)head_dim * 4, j, keys);
        free(q[j]);
        free(a[j]);
        free(b[j]);
    }
    free(pool);
}

static double seconds(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static void bench(int type, const char *name, int32_t n)
{
    enum { ROWS = 1024, COLS = 2048 };
    const struct matrix w = random_matrix(type, ROWS, COLS);
    const size_t stride = type_reads_q8(type) ? q8_row_bytes(COLS) : COLS * 4;
    uint8_t *const x = take(stride * (size_t)n);
    float *const row = take(COLS * 4), *const y = take((size_t)n * ROWS * 4);
    for (int32_t t = 0; t < n; t++) {
        fill(row, COLS, 3, false);
        if (type_reads_q8(type)) tested->quantize(row, COLS, 0, COLS / 32, x + stride * (size_t)t);
        else memcpy(x + stride * (size_t)t, row, COLS * 4);
    }
    const struct matmul m = {.w = &w, .n_panels = matrix_panels(&w), .x = x, .x_stride = stride, .n = n, .y = y, .y_stride = ROWS};
    double best = 1e9;
    for (int repeat = 0; repeat < 20; repeat++) {
        const double start = seconds();
        tested->matmul[type](&m);
        const double time = seconds() - start;
        if (time < best) best = time;
    }
    printf("%-7s %-4s n %3d: %7.1f GB/s of weights, %7.1f GOP/s\n", tested->name, name, n,
           (double)panel_bytes(type, COLS) * ROWS / 16 / best * 1e-9, 2.0 * ROWS * COLS * n / best * 1e-9);
    free((void *)(uintptr_t)w.data);
    free(x);
    free(row);
    free(y);
}

int main(int argc, char **argv)
{
    enum { N_TYPES = 4 };
    static const int types[N_TYPES] = {TYPE_F32, TYPE_BF16, TYPE_Q8, TYPE_Q4};
    static const char *const names[N_TYPES] = {"f32", "bf16", "q8", "q4"};
    const bool benches = argc > 1 && strcmp(argv[1], "--bench") == 0;
    bool usable;
    for (int i = 0; (tested = kernels_list(i, &usable)) != NULL; i++) {
        if (!usable) {
            printf("%-7s not on this machine\n", tested->name);
            continue;
        }
        for (int round = 0; round < 120; round++) {
            const int32_t rows = 1 + (int32_t)(next_random() % 90), cols = 1 + (int32_t)(next_random() % 700);
            test_matmul(types[round % N_TYPES], rows, cols, 1 + (int32_t)(next_random() % 20));
            test_rows(1 + (int32_t)(next_random() % 300), round % 2 == 0);
            test_attend(1 + (int32_t)(next_random() % 80), 1 + (int32_t)(next_random() % 700), 1 + round % ATTEND_TILE);
        }
        printf("%-7s same bytes as scalar\n", tested->name);
        for (int t = 0; benches && t < N_TYPES; t++) {
            bench(types[t], names[t], 1);
            bench(types[t], names[t], 64);
        }
    }
    return 0;
}
