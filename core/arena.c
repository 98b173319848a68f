/* arena.c: the bump allocator of arena.h. Owns no memory; refuses to free. */
#include "arena.h"

void *arena_take(struct arena *arena, uint64_t count, uint64_t size) {
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
