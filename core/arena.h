/* arena.h: one reservation, handed out front to back. With no base it only counts, so that the plan of a layout and
 * the layout itself are the same code and cannot disagree. Every piece is 64-byte aligned. Owns no memory; refuses to free.
 *
 *   base |piece|pad|piece|pad| ... | used   (sum of pieces, each rounded up to 64) */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct arena {
    uint8_t *base;  /* NULL: count only */
    uint64_t used;  /* bytes */
    bool overflow;  /* a size did not fit in 64 bits: the layout is impossible */
};

/* `count` elements of `size` bytes; NULL while counting. Contents are undefined if the memory is the caller's. */
static inline void *arena_take(struct arena *arena, uint64_t count, uint64_t size) {
    uint64_t bytes, end;
    if (__builtin_mul_overflow(count, size, &bytes) || bytes > UINT64_MAX - 63 ||
        __builtin_add_overflow(arena->used, (bytes + 63) & ~(uint64_t)63, &end)) {
        arena->overflow = true;
        return NULL;
    }
    void *const piece = arena->base == NULL ? NULL : arena->base + arena->used;
    arena->used = end;
    return piece;
}
