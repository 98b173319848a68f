/* avx2.c: the kernel set for x86-64 with AVX2, FMA and F16C (2013 on). Sixteen lanes are two registers. With AVX2_VNNI
 * (avx2_vnni.c) the set for processors that have AVX-VNNI too. */
#include "kernels.h"

#if defined(__x86_64__)
#if defined(AVX2_VNNI) && !defined(COLIBRI_AVX_VNNI_HEADER)
TARGET("avx2,fma,f16c,avxvnni")
#else
TARGET("avx2,fma,f16c")
#endif
#include <immintrin.h>
#if defined(AVX2_VNNI) && defined(COLIBRI_AVX_VNNI_HEADER)
#include COLIBRI_AVX_VNNI_HEADER
#endif

#define REGISTER 32
#include "lanes.h"

#define VF(x, y) ((vf){x, y})
#define VI(x, y) ((vi){(ints)x, (ints)y})
#define BYTES(x) ((__m256i)(x))

INLINE vf vf_max(vf x, vf y) { return VF(_mm256_max_ps(x.a, y.a), _mm256_max_ps(x.b, y.b)); }
INLINE vf vf_min(vf x, vf y) { return VF(_mm256_min_ps(x.a, y.a), _mm256_min_ps(x.b, y.b)); }
INLINE vi vi_round(vf v) { return VI(_mm256_cvtps_epi32(v.a), _mm256_cvtps_epi32(v.b)); }
INLINE vf vf_fma(vf x, vf y, vf z) { return VF(_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)); }

INLINE vf vf_first(vf v, int n, float fill) {
    const ints count = n - (ints){0}, low = {0, 1, 2, 3, 4, 5, 6, 7}, high = low + 8;
    const floats other = fill - (floats){0};
    return VF(_mm256_blendv_ps(other, v.a, (floats)(count > low)), _mm256_blendv_ps(other, v.b, (floats)(count > high)));
}

INLINE __m128i load_half(const uint8_t *p) { return _mm_loadu_si128((const __m128i *)(const void *)p); }
INLINE vf vf_f16(const uint8_t *p) { return VF(_mm256_cvtph_ps(load_half(p)), _mm256_cvtph_ps(load_half(p + 16))); }

INLINE vf vf_i8(const uint8_t *p) {
    const __m128i all = load_half(p);
    return vf_from_vi(VI(_mm256_cvtepi8_epi32(all), _mm256_cvtepi8_epi32(_mm_srli_si128(all, 8))));
}

#if defined(AVX2_VNNI)
/* Stored weights, unsigned, times activations, signed: what the instruction multiplies. */
typedef vi wq;
#define wq_of VI

INLINE vi vi_dot4(vi acc, wq w, aq x) {
    return VI(_mm256_dpbusd_avx_epi32(BYTES(acc.a), BYTES(w.a), BYTES(x)), _mm256_dpbusd_avx_epi32(BYTES(acc.b), BYTES(w.b), BYTES(x)));
}

#define KERNELS kernels_avx2_vnni
#define KERNELS_NAME "avx2-vnni"
#else
typedef struct wq { __m256i a, b, size_a, size_b; } wq; /* w, |w| */
typedef struct ni { __m256i a, b; } ni;       /* 16-bit lanes, two of them a row: 8 x 2 x 15 x 127 fits, 4 x 2 x 32 x 127 too */

/* |w| times (x with the sign of w): two products, at most 128 x 127 each, fit 16 bits and nothing saturates. */
INLINE wq wq_of(__m256i a, __m256i b) {
    const __m256i middle = _mm256_set1_epi8(-128);
    a = _mm256_xor_si256(a, middle), b = _mm256_xor_si256(b, middle);
    return (wq){a, b, _mm256_abs_epi8(a), _mm256_abs_epi8(b)};
}

INLINE vi sums(__m256i a, __m256i b) { /* of neighbours, 16 bits wide */
    const __m256i one = _mm256_set1_epi16(1);
    return VI(_mm256_madd_epi16(a, one), _mm256_madd_epi16(b, one));
}

INLINE vi vi_dot4(vi acc, wq w, aq x) {
    const __m256i a = _mm256_maddubs_epi16(w.size_a, _mm256_sign_epi8(BYTES(x), w.a));
    return vi_add(acc, sums(a, _mm256_maddubs_epi16(w.size_b, _mm256_sign_epi8(BYTES(x), w.b))));
}

#define NI_OWN
INLINE ni ni_zero(void) { return (ni){_mm256_setzero_si256(), _mm256_setzero_si256()}; }
INLINE ni ni_start(const uint8_t *p) { return (ni){BYTES(aq_load(p)), BYTES(aq_load(p))}; } /* sums wrap, and back */
INLINE vi ni_sum(ni acc) { return sums(acc.a, acc.b); }

INLINE ni ni_dot4(ni acc, nq w, aq x) {
    return (ni){_mm256_add_epi16(acc.a, _mm256_maddubs_epi16(BYTES(w.a), BYTES(x))),
                _mm256_add_epi16(acc.b, _mm256_maddubs_epi16(BYTES(w.b), BYTES(x)))};
}

#define Q8_SIGNED 1
#define KERNELS kernels_avx2
#define KERNELS_NAME "avx2"
#endif

INLINE wq wq_load(const uint8_t *p) { return wq_of(BYTES(vi_load(p).a), BYTES(vi_load(p).b)); }

INLINE wq wq_mxfp4(nq n) {
    const __m256i stored = _mm256_broadcastsi128_si256(_mm_xor_si128(_mm_setr_epi8(MXFP4_VALUES), _mm_set1_epi8(-128)));
    return wq_of(_mm256_shuffle_epi8(stored, BYTES(n.a)), _mm256_shuffle_epi8(stored, BYTES(n.b)));
}

#define KEEP(v) __asm__("" : "+x"((v).a), "+x"((v).b))
#define MATMUL_TILE 4
#define MATMUL_PANELS 4
#include "body.h"
TARGET_END
#endif
