/* kernel_input.h: what kernel_test.c feeds the kernels: pseudo-random numbers and matrices, ordinary and extreme.
 * Owns the generator's state; everything is the same in each run. */
#ifndef KERNEL_INPUT_H
#define KERNEL_INPUT_H

#include "../../core/kernels/kernels.h"

#include <stdlib.h>
#include <string.h>

/* ORDINARY: random. HIGHEST, LOWEST: the largest and smallest of everything, where integer sums are at their limits and
 * floats at the edge of their range (LOWEST: subnormal). JUMPING: each byte one end of its range or the other. */
enum content { ORDINARY, HIGHEST, LOWEST, JUMPING, N_CONTENTS };

static uint64_t state = 88172645463325252u;

static inline uint32_t next_random(void) {
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    return (uint32_t)(state >> 32);
}

static inline int32_t random_below(int32_t n) {
    return (int32_t)(next_random() % (uint32_t)n);
}

static inline float random_float(float scale) {
    return ((float)next_random() / 2147483648.0f - 1.0f) * scale;
}

/* HIGHEST and LOWEST give one magnitude, so that all quants are +-127; JUMPING mixes awkward numbers in. */
static inline void fill(float *x, int32_t n, float scale, enum content content) {
    static const float odd[] = {0.0f, -0.0f, 1e-40f, -1e-44f, 3e38f, -3e38f, 1e-30f, 65504.0f, 127.0f, -127.5f};
    const int sign = random_below(3); /* all positive, all negative, random */
    for (int32_t i = 0; i < n; i++) {
        const bool negative = sign == 1 || (sign == 2 && next_random() % 2);
        x[i] = random_float(scale);
        if (content == HIGHEST) x[i] = negative ? -scale : scale;
        if (content == LOWEST) x[i] = (negative ? -1e-41f : 1e-41f) * (float)(1 + random_below(2));
        if (content == JUMPING && next_random() % 7 == 0) x[i] = odd[next_random() % (sizeof odd / sizeof *odd)];
    }
}

static inline void *take(size_t bytes) {
    void *const memory = aligned_alloc(64, (bytes + 127) & ~(size_t)63);
    if (memory == NULL) abort();
    memset(memory, 0, (bytes + 127) & ~(size_t)63);
    return memory;
}

/* Finite and positive. */
static inline void put_f16(uint8_t *at, enum content content) {
    uint16_t half = (uint16_t)(next_random() % 11 == 0 ? next_random() % 0x400 : 0x1000 + next_random() % 0x1000);
    if (content == HIGHEST) half = 0x7bff;
    if (content == LOWEST) half = 1;
    memcpy(at, &half, 2);
}

/* A byte of which `lowest` … 255 are valid. */
static inline uint8_t some_byte(enum content content, int lowest) {
    if (content == HIGHEST || content == LOWEST) return content == HIGHEST ? 255 : (uint8_t)lowest;
    if (content == JUMPING || next_random() % 9 == 0) return next_random() % 2 ? (uint8_t)lowest : 255;
    return (uint8_t)(lowest + random_below(256 - lowest));
}

/* Any bytes are a q4 panel, but for the f16 scales: those stay finite. */
static inline void fill_q4_panel(uint8_t *panel, size_t groups, enum content content) {
    for (size_t i = 0; i < groups * 256; i++) panel[i] = some_byte(content == LOWEST ? HIGHEST : content, 0);
    for (size_t s = 0; s < (groups + Q4_SUPER - 1) / Q4_SUPER; s++) {
        uint8_t *const scales = panel + (groups + s) * 256;
        for (size_t i = 0; i < 32; i++) put_f16(scales + i * 2, content);
        for (size_t i = 64; i < 256; i++) scales[i] = some_byte(content, 0); /* LOWEST: 6-bit scales of 0 */
    }
}

/* Any bytes are a q6 panel, but for the f16 scales: those stay finite. LOWEST: quants of -32 and scales of -128. */
static inline void fill_q6_panel(uint8_t *panel, size_t groups, enum content content) {
    for (size_t i = 0; i < groups * group_bytes(TYPE_Q6); i++) panel[i] = some_byte(content, 0);
    for (size_t s = 0; s < (groups + Q4_SUPER - 1) / Q4_SUPER; s++) {
        uint8_t *const record = panel + groups * group_bytes(TYPE_Q6) + s * record_bytes(TYPE_Q6);
        for (size_t i = 0; i < 16; i++) {
            put_f16(record + i * 2, content);
            if (next_random() % 2) record[i * 2 + 1] ^= 128; /* d may be negative */
        }
        for (size_t i = 32; i < record_bytes(TYPE_Q6); i++) record[i] = some_byte(content, 0);
    }
}

static inline void fill_q8_panel(uint8_t *panel, size_t cols, enum content content) {
    const size_t groups = q8_groups(cols);
    for (size_t k = 0; k < groups * Q8_GROUP; k++) {
        for (size_t r = 0; r < 16; r++) { /* past the last column as the writer leaves it */
            panel[k / 32 * 512 + k % 32 / 4 * 64 + r * 4 + k % 4] = k < cols ? some_byte(content, 1) : 128;
        }
    }
    for (size_t i = 0; i < groups * 16; i++) put_f16(panel + groups * 512 + i * 2, content);
}

/* Scales to 2^100, so that sums stay finite. */
static inline void fill_mxfp4_panel(uint8_t *panel, size_t groups, enum content content) {
    const size_t quants = groups * 256, scales = (groups + MXFP4_FOURS - 1) / MXFP4_FOURS * 64;
    for (size_t i = 0; i < quants; i++) {
        panel[i] = content == HIGHEST ? (next_random() % 2 ? 0x77 : 0xff) : content == LOWEST ? 0x19 : (uint8_t)next_random();
    }
    for (size_t i = 0; i < scales; i++) {
        panel[quants + i] = (uint8_t)(content == HIGHEST ? 227 : content == LOWEST ? (int32_t)(i % 3) : 110 + random_below(30));
    }
}

static inline void fill_float_panel(uint8_t *panel, int type, size_t cols, enum content content) {
    for (size_t k = 0; k < cols; k++) {
        float row[16];
        fill(row, 16, content == HIGHEST ? 1e18f : 0.5f, content == JUMPING ? ORDINARY : content);
        for (size_t r = 0; r < 16; r++) {
            uint8_t bytes[4];
            memcpy(bytes, &row[r], 4);
            if (type == TYPE_F32) memcpy(panel + k * 64 + r * 4, bytes, 4);
            else memcpy(panel + k / 2 * 64 + r * 4 + k % 2 * 2, bytes + 2, 2);
        }
    }
}

static inline struct matrix new_matrix(int type, int32_t rows, int32_t cols, enum content content) {
    const size_t bytes = panel_bytes(type, (uint64_t)cols), panels = (size_t)(rows + 15) / 16;
    uint8_t *const data = take(bytes * panels);
    for (size_t p = 0; p < panels; p++) {
        uint8_t *const panel = data + p * bytes;
        if (type == TYPE_Q4) fill_q4_panel(panel, q8_groups((size_t)cols), content);
        else if (type == TYPE_Q6) fill_q6_panel(panel, q8_groups((size_t)cols), content);
        else if (type == TYPE_MXFP4) fill_mxfp4_panel(panel, q8_groups((size_t)cols), content);
        else if (type == TYPE_Q8) fill_q8_panel(panel, (size_t)cols, content);
        else fill_float_panel(panel, type, (size_t)cols, content);
    }
    return (struct matrix){data, rows, cols, (uint8_t)type};
}

static inline void free_matrix(const struct matrix *w) {
    free((void *)(uintptr_t)w->data);
}

/* Bytes from one activation row to the next: f32 rows end on no boundary. */
static inline size_t activation_stride(int type, int32_t cols) {
    return type_reads_q8(type) ? q8_row_bytes((size_t)cols) : (size_t)cols * 4 + 4;
}

/* Beside extreme weights: quants of +-127, or floats that keep the sums finite and the smallest ones above zero. */
static inline void fill_activations(int type, uint8_t *x, int32_t n, int32_t cols, enum content content) {
    const enum content kind = content == LOWEST && type_reads_q8(type) ? HIGHEST : content == HIGHEST ? HIGHEST : ORDINARY;
    float *const row = take((size_t)cols * 4);
    for (int32_t t = 0; t < n; t++) {
        uint8_t *const to = x + activation_stride(type, cols) * (size_t)t;
        fill(row, cols, 3, kind);
        if (type_reads_q8(type)) kernels_scalar.quantize(row, cols, 0, (int32_t)q8_groups((size_t)cols), to);
        else memcpy(to, row, (size_t)cols * 4);
    }
    free(row);
}

#endif
