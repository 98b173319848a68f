/* kernel_bench.h: the rates of kernel_test --bench: one line for each kernel of a set, best of many calls, one thread,
 * operands in the cache as far as they fit. */
#ifndef KERNEL_BENCH_H
#define KERNEL_BENCH_H

#include "kernel_input.h"

#include <stdio.h>
#include <time.h>

enum { BENCH_N = 2048, BENCH_ROWS = 1024, BENCH_HEAD = 128, BENCH_KEYS = 4096 };

enum entry { QUANTIZE, RMS_NORM, SILU_MUL, SOFTMAX, ROTATE, ADD_SCALED, CLAMP, DOT, EXP, ALL_FINITE, ARGMAX, READ_ROW, MATMUL,
             ATTEND, ATTEND_BLOCK, ATTEND_MERGE, CONVOLVE, DELTA };

static const char *const entry_names[] = {"quantize", "rms_norm", "silu_mul", "softmax", "rotate", "add_scaled",
                                          "clamp", "dot", "exp", "all_finite", "argmax", "read_row", "matmul",
                                          "attend", "attend_block", "attend_merge", "convolve", "delta"};

/* Operands of one call. */
struct bench {
    const struct kernels *kernels;
    enum entry entry;
    float *a, *b;          /* [BENCH_N]: changed, read */
    uint8_t *row;          /* a q8 row */
    struct matmul matmul;
    struct attend attend;
    struct delta delta;
    float *partials;       /* of each query and block */
};

static volatile float bench_sink; /* what must not be optimised away */

static inline void bench_call(const struct bench *b) {
    const struct kernels *const k = b->kernels;
    switch (b->entry) {
    case QUANTIZE: k->quantize(b->b, BENCH_N, 0, BENCH_N / Q8_GROUP, b->row); break;
    case RMS_NORM: k->rms_norm(b->a, b->b, b->b, BENCH_N, 1e-5f); break;
    case SILU_MUL: k->silu_mul(b->a, b->b, BENCH_N, 7, 1.702f, 0, 1); break;
    case SOFTMAX: k->softmax(b->a, BENCH_N); break;
    case ROTATE: k->rotate(b->a, b->b, b->b + BENCH_HEAD, BENCH_HEAD); break;
    case ADD_SCALED: k->add_scaled(b->a, b->b, 0.001f, BENCH_N); break;
    case CLAMP: k->clamp(b->a, -1, 1, BENCH_N); break;
    case DOT: bench_sink = k->dot(b->a, b->b, BENCH_N); break;
    case EXP: bench_sink = k->exp(b->b[0]); break;
    case ALL_FINITE: bench_sink = k->all_finite(b->b, BENCH_N); break;
    case ARGMAX: bench_sink = (float)k->argmax(b->b, BENCH_N); break;
    case READ_ROW: k->read_row(b->matmul.w, 5, b->a); break;
    case MATMUL: k->matmul[b->matmul.w->type](&b->matmul); break;
    case ATTEND: k->attend(&b->attend, -1); break;
    case ATTEND_BLOCK: k->attend(&b->attend, 0); break;
    case CONVOLVE: k->convolve(b->a, BENCH_HEAD, BENCH_N / BENCH_HEAD, BENCH_HEAD, b->b, BENCH_HEAD, 4, b->partials, true); break;
    case DELTA: k->delta(&b->delta); break;
    case ATTEND_MERGE: k->attend_merge(b->partials, BENCH_KEYS / KV_BLOCK, BENCH_HEAD, NULL, b->attend.out[0]); break;
    }
}

static inline double seconds(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* Seconds of one call: the best of 15 runs of about a millisecond, fewer if that takes long. */
static inline double bench_time(const struct bench *b) {
    const double begin = seconds();
    double best = 1e9;
    int calls = 1;
    for (int run = 0; run < 15 && (run < 2 || seconds() - begin < 0.3); run++) {
        memcpy(b->a, b->b, BENCH_N * sizeof(float));
        const double start = seconds();
        for (int i = 0; i < calls; i++) bench_call(b);
        const double time = (seconds() - start) / calls;
        if (time < best) best = time;
        if (time * calls < 5e-4 && calls < 1 << 20) {
            calls *= 2;
            run--;
        }
    }
    return best;
}

static inline void bench_line(const struct bench *b, const char *detail, double size, const char *unit) {
    const double time = bench_time(b);
    printf("%-12s %-12s %-16s %10.3f us %8.2f G%s/s\n", b->kernels->name, entry_names[b->entry], detail, time * 1e6,
           size / time * 1e-9, unit);
}

static inline void bench_matrices(struct bench *b, int type, const char *name) {
    enum { ROWS = 64 };
    const struct matrix w = new_matrix(type, BENCH_ROWS, BENCH_N, ORDINARY);
    uint8_t *const x = take(activation_stride(type, BENCH_N) * ROWS);
    float *const y = take((size_t)ROWS * BENCH_ROWS * 4);
    fill_activations(type, x, ROWS, BENCH_N, ORDINARY);
    b->matmul = (struct matmul){.w = &w, .n_panels = matrix_panels(&w), .x = x, .x_stride = activation_stride(type, BENCH_N),
                                .y = y, .y_stride = BENCH_ROWS};
    for (int32_t n = 1; n <= ROWS; n *= ROWS) {
        char detail[32];
        snprintf(detail, sizeof detail, "%s n %d", name, n);
        b->entry = MATMUL;
        b->matmul.n = n;
        bench_line(b, detail, n == 1 ? (double)panel_bytes(type, BENCH_N) * BENCH_ROWS / 16 : 2.0 * BENCH_ROWS * BENCH_N * n,
                   n == 1 ? "B of weights" : "OP");
    }
    b->entry = READ_ROW;
    bench_line(b, name, BENCH_N, "elements");
    free_matrix(&w);
    free(x);
    free(y);
}

static inline void bench_attention(struct bench *b) {
    enum { BLOCKS = BENCH_KEYS / KV_BLOCK };
    const size_t block_floats = (size_t)KV_BLOCK * BENCH_HEAD * 2;
    float *const pool = take(BLOCKS * block_floats * 4), *const rows = take(2 * ATTEND_TILE * BENCH_HEAD * 4);
    int32_t table[BLOCKS];
    fill(pool, (int32_t)(BLOCKS * block_floats), 1, ORDINARY);
    fill(rows, ATTEND_TILE * BENCH_HEAD, 1, ORDINARY);
    for (int32_t i = 0; i < BLOCKS; i++) table[i] = i;
    b->entry = ATTEND;
    b->attend = (struct attend){.pool = (const uint8_t *)pool, .table = table, .block_bytes = block_floats * 4,
                                .v_offset = block_floats * 2, .key_dim = BENCH_HEAD, .value_dim = BENCH_HEAD,
                                .block_positions = KV_BLOCK, .scale = 0.1f};
    for (int j = 0; j < ATTEND_TILE; j++) {
        b->attend.q[j] = rows + (size_t)j * BENCH_HEAD;
        b->attend.out[j] = rows + (size_t)(ATTEND_TILE + j) * BENCH_HEAD;
    }
    for (int32_t keys = 64; keys <= BENCH_KEYS; keys *= 8) {
        for (int n = 1; n <= ATTEND_TILE; n *= 4) {
            char detail[32];
            snprintf(detail, sizeof detail, "n %d, %d keys", n, keys);
            for (int j = 0; j < n; j++) b->attend.n_keys[j] = keys;
            b->attend.n = n;
            bench_line(b, detail, 4.0 * n * keys * BENCH_HEAD, "FLOP");
        }
    }
    b->partials = take(BLOCKS * attend_partial_floats(BENCH_HEAD) * 4);
    for (int j = 0; j < ATTEND_TILE; j++) b->attend.partial[j] = b->partials + (size_t)j * attend_partial_floats(BENCH_HEAD);
    b->entry = ATTEND_BLOCK;
    bench_line(b, "n 16, 128 keys", 4.0 * ATTEND_TILE * KV_BLOCK * BENCH_HEAD, "FLOP");
    b->entry = ATTEND_MERGE;
    bench_line(b, "32 blocks", BLOCKS * BENCH_HEAD, "elements");
    free(pool);
    free(rows);
    free(b->partials);
}

/* One head of 128 by 128 over 16 rows, and a convolution of as many channels. */
static inline void bench_states(struct bench *b) {
    enum { ROWS = BENCH_N / BENCH_HEAD };
    b->partials = take(((size_t)BENCH_HEAD * BENCH_HEAD + ROWS * BENCH_HEAD) * 4);
    b->entry = CONVOLVE;
    bench_line(b, "n 16, width 4", BENCH_N, "elements");
    memset(b->partials, 0, (size_t)BENCH_HEAD * BENCH_HEAD * 4);
    b->entry = DELTA;
    b->delta = (struct delta){.n = ROWS, .key_dim = BENCH_HEAD, .value_dim = BENCH_HEAD, .q = b->b, .k = b->b, .stride = BENCH_HEAD,
                              .v = b->partials + (size_t)BENCH_HEAD * BENCH_HEAD, .beta = b->b, .decay = b->b, .log_rate = -4,
                              .state = b->partials};
    fill(b->delta.v, BENCH_N, 1, ORDINARY);
    bench_line(b, "n 16", 7.0 * ROWS * BENCH_HEAD * BENCH_HEAD, "FLOP");
    free(b->partials);
}

/* All kernels of a set. */
static inline void bench_set(const struct kernels *kernels) {
    struct bench b = {.kernels = kernels, .a = take(BENCH_N * 4), .b = take(BENCH_N * 4), .row = take(q8_row_bytes(BENCH_N))};
    fill(b.b, BENCH_N, 1, ORDINARY);
    for (enum entry entry = QUANTIZE; entry <= ARGMAX; entry++) {
        const int n = entry == ROTATE ? BENCH_HEAD : entry == EXP ? 1 : BENCH_N;
        char detail[32];
        snprintf(detail, sizeof detail, "n %d", n);
        b.entry = entry;
        bench_line(&b, detail, n, "elements");
    }
    bench_matrices(&b, TYPE_F32, "f32");
    bench_matrices(&b, TYPE_BF16, "bf16");
    bench_matrices(&b, TYPE_Q8, "q8");
    bench_matrices(&b, TYPE_Q4, "q4");
    bench_matrices(&b, TYPE_Q6, "q6");
    bench_matrices(&b, TYPE_MXFP4, "mxfp4");
    bench_attention(&b);
    bench_states(&b);
    free(b.a);
    free(b.b);
    free(b.row);
}

#endif
