/* lanes.h: sixteen lanes as registers of REGISTER bytes, and what the operators of gcc and clang do to them: lane by lane,
 * IEEE, rounded to nearest even, one instruction a register. A file of an instruction set includes it and adds, in intrinsics,
 * what body.h lists. Loads and stores are unaligned. */
#pragma once

#include "kernels.h"

#include <string.h>

#define INLINE static inline __attribute__((always_inline))

typedef float floats __attribute__((vector_size(REGISTER)));
typedef int32_t ints __attribute__((vector_size(REGISTER)));

/* f(x), or x op y, of each register; the same in each. A number less a vector of zeros is that number in every lane. */
#if REGISTER == 16
typedef struct vf { floats a, b, c, d; } vf;
typedef struct vi { ints a, b, c, d; } vi;
#define EACH(type, f, x) ((type){f((x).a), f((x).b), f((x).c), f((x).d)})
#define BOTH(type, x, op, y) ((type){(x).a op (y).a, (x).b op (y).b, (x).c op (y).c, (x).d op (y).d})
#define SAME(type, x) ((type){x, x, x, x})
#elif REGISTER == 32
typedef struct vf { floats a, b; } vf;
typedef struct vi { ints a, b; } vi;
#define EACH(type, f, x) ((type){f((x).a), f((x).b)})
#define BOTH(type, x, op, y) ((type){(x).a op (y).a, (x).b op (y).b})
#define SAME(type, x) ((type){x, x})
#else
typedef floats vf;
typedef ints vi;
#define EACH(type, f, x) (f(x))
#define BOTH(type, x, op, y) ((x) op (y))
#define SAME(type, x) (x)
#endif
typedef vi nq;   /* 16 rows x 4 k of up to 6 bits */
typedef ints aq; /* 4 activation bytes, signed, for all rows of a register */
struct loose_vf { vf v; } __attribute__((packed, may_alias));
struct loose_vi { vi v; } __attribute__((packed, may_alias));

INLINE vf vf_load(const float *p) { return ((const struct loose_vf *)(const void *)p)->v; }
INLINE void vf_store(float *p, vf v) { ((struct loose_vf *)(void *)p)->v = v; }
INLINE vi vi_load(const uint8_t *p) { return ((const struct loose_vi *)(const void *)p)->v; }
INLINE vf vf_set1(float x) { return SAME(vf, x - (floats){0}); }
INLINE vi vi_set1(int32_t x) { return SAME(vi, x - (ints){0}); }
INLINE vf vf_add(vf x, vf y) { return BOTH(vf, x, +, y); }
INLINE vf vf_sub(vf x, vf y) { return BOTH(vf, x, -, y); }
INLINE vf vf_mul(vf x, vf y) { return BOTH(vf, x, *, y); }
INLINE vf vf_div(vf x, vf y) { return BOTH(vf, x, /, y); }
INLINE vi vi_add(vi x, vi y) { return BOTH(vi, x, +, y); }
INLINE vi vi_and(vi x, vi y) { return BOTH(vi, x, &, y); }
#define LEFT(x) ((x) << n)
INLINE vi vi_left(vi v, int n) { return EACH(vi, LEFT, v); }
#define RIGHT(x) ((x) >> n)
INLINE vi vi_right(vi v, int n) { return EACH(vi, RIGHT, v); }
/* Bits shift … shift + n - 1 of each lane, as a number. */
INLINE vi vi_bits(vi v, int shift, int n) { return vi_and(vi_right(v, shift), vi_set1((1 << n) - 1)); }
/* The same bits, as floats and as integers; the nearest floats. */
INLINE vf vf_of(vi bits) { return EACH(vf, (floats), bits); }
INLINE vi vi_of(vf v) { return EACH(vi, (ints), v); }
#define TO_FLOATS(x) __builtin_convertvector(x, floats)
INLINE vf vf_from_vi(vi v) { return EACH(vf, TO_FLOATS, v); }
/* Each of 64 bytes >> shift & mask. */
INLINE nq nq_bits(const uint8_t *p, int shift, int mask) { return vi_and(vi_right(vi_load(p), shift), vi_set1(mask * 0x01010101)); }
INLINE nq nq_or(nq x, nq y) { return BOTH(nq, x, |, y); }

INLINE aq aq_load(const uint8_t *p) {
    int32_t quad;
    memcpy(&quad, p, sizeof quad);
    return quad - (ints){0};
}
