/* avx2.c: the kernel set for x86-64 with AVX2, FMA and F16C (2013 on). Sixteen lanes are two registers. With AVX2_VNNI
 * (avx2_vnni.c) the set for processors that have AVX-VNNI too. */
#if defined(__x86_64__)
#if defined(AVX2_VNNI) && !defined(COLIBRI_AVX_VNNI_HEADER)
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c,avxvnni"))), apply_to = function)
#elif defined(__GNUC__)
#pragma GCC target("avx2,fma,f16c,avxvnni")
#endif
#else
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c"))), apply_to = function)
#elif defined(__GNUC__)
#pragma GCC target("avx2,fma,f16c")
#endif
#endif

#include "kernels.h"
#include <immintrin.h>
#if defined(AVX2_VNNI) && defined(COLIBRI_AVX_VNNI_HEADER)
#include COLIBRI_AVX_VNNI_HEADER
#endif
#include <stdint.h>
#include <string.h>

typedef struct vf { __m256 a, b; } vf;
typedef struct vi { __m256i a, b; } vi;
typedef struct nq { __m256i a, b; } nq;

#define VF(x, y) ((vf){x, y})
#define VI(x, y) ((vi){x, y})

static inline vf vf_load(const float *p) { return VF(_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)); }
static inline void vf_store(float *p, vf v) { _mm256_storeu_ps(p, v.a); _mm256_storeu_ps(p + 8, v.b); }
static inline vf vf_set1(float x) { return VF(_mm256_set1_ps(x), _mm256_set1_ps(x)); }
static inline vf vf_add(vf x, vf y) { return VF(_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)); }
static inline vf vf_sub(vf x, vf y) { return VF(_mm256_sub_ps(x.a, y.a), _mm256_sub_ps(x.b, y.b)); }
static inline vf vf_mul(vf x, vf y) { return VF(_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)); }
static inline vf vf_div(vf x, vf y) { return VF(_mm256_div_ps(x.a, y.a), _mm256_div_ps(x.b, y.b)); }
static inline vf vf_max(vf x, vf y) { return VF(_mm256_max_ps(x.a, y.a), _mm256_max_ps(x.b, y.b)); }
static inline vf vf_min(vf x, vf y) { return VF(_mm256_min_ps(x.a, y.a), _mm256_min_ps(x.b, y.b)); }
static inline vi vi_set1(int32_t x) { return VI(_mm256_set1_epi32(x), _mm256_set1_epi32(x)); }
static inline vf vf_from_vi(vi v) { return VF(_mm256_cvtepi32_ps(v.a), _mm256_cvtepi32_ps(v.b)); }
static inline vi vi_round(vf v) { return VI(_mm256_cvtps_epi32(v.a), _mm256_cvtps_epi32(v.b)); }

static inline vf vf_fma(vf x, vf y, vf z) {
    return VF(_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b));
}

static inline vf vf_first(vf v, int n, float fill) {
    const __m256i count = _mm256_set1_epi32(n);
    const __m256i low = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    const __m256i high = _mm256_setr_epi32(8, 9, 10, 11, 12, 13, 14, 15);
    const __m256 other = _mm256_set1_ps(fill);
    return VF(_mm256_blendv_ps(other, v.a, _mm256_castsi256_ps(_mm256_cmpgt_epi32(count, low))),
              _mm256_blendv_ps(other, v.b, _mm256_castsi256_ps(_mm256_cmpgt_epi32(count, high))));
}

static inline __m256 times_pow2(__m256 v, __m256 n) {
    return _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(v), _mm256_slli_epi32(_mm256_cvtps_epi32(n), 23)));
}

static inline vf vf_times_pow2(vf v, vf n) { return VF(times_pow2(v.a, n.a), times_pow2(v.b, n.b)); }

static inline vf vf_f16(const uint8_t *p) {
    return VF(_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(const void *)p)),
              _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(const void *)(p + 16))));
}

static inline __m256i load_bytes(const uint8_t *p) { return _mm256_loadu_si256((const __m256i *)(const void *)p); }

static inline void vf_bf16_pair(const uint8_t *p, vf *even, vf *odd) {
    const __m256i a = load_bytes(p), b = load_bytes(p + 32), upper = _mm256_set1_epi32((int)0xffff0000u);
    *even = VF(_mm256_castsi256_ps(_mm256_slli_epi32(a, 16)), _mm256_castsi256_ps(_mm256_slli_epi32(b, 16)));
    *odd = VF(_mm256_castsi256_ps(_mm256_and_si256(a, upper)), _mm256_castsi256_ps(_mm256_and_si256(b, upper)));
}

static inline vf vf_i8(const uint8_t *p) {
    const __m128i all = _mm_loadu_si128((const __m128i *)(const void *)p);
    return vf_from_vi(VI(_mm256_cvtepi8_epi32(all), _mm256_cvtepi8_epi32(_mm_srli_si128(all, 8))));
}

static inline void vi_store_i8(int8_t *p, vi v) {
    const __m256i words = _mm256_permute4x64_epi64(_mm256_packs_epi32(v.a, v.b), 0xd8);
    const __m128i bytes = _mm_packs_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
    _mm_storeu_si128((__m128i *)(void *)p, bytes);
}

static inline vi vi_load(const uint8_t *p) { return VI(load_bytes(p), load_bytes(p + 32)); }

static inline vi vi_bits(vi v, int shift, int n) {
    const __m256i mask = _mm256_set1_epi32((1 << n) - 1);
    return VI(_mm256_and_si256(_mm256_srli_epi32(v.a, shift), mask), _mm256_and_si256(_mm256_srli_epi32(v.b, shift), mask));
}

static inline nq nq_bits(const uint8_t *p, int shift, char mask) {
    const __m256i a = _mm256_srli_epi16(load_bytes(p), shift), b = _mm256_srli_epi16(load_bytes(p + 32), shift);
    return (nq){_mm256_and_si256(a, _mm256_set1_epi8(mask)), _mm256_and_si256(b, _mm256_set1_epi8(mask))};
}

static inline nq nq_or(nq x, nq y) { return (nq){_mm256_or_si256(x.a, y.a), _mm256_or_si256(x.b, y.b)}; }

typedef __m256i aq;

static inline aq aq_load(const uint8_t *p) {
    int32_t quad;
    memcpy(&quad, p, sizeof quad);
    return _mm256_set1_epi32(quad);
}

#if defined(AVX2_VNNI)
/* Stored weights, unsigned, times activations, signed: what the instruction multiplies. */
typedef vi wq;
typedef vi ni;

#define wq_of(a, b) ((wq){a, b}) /* of stored bytes */

static inline vi vi_dot4(vi acc, wq w, aq x) {
    return VI(_mm256_dpbusd_avx_epi32(acc.a, w.a, x), _mm256_dpbusd_avx_epi32(acc.b, w.b, x));
}

static inline ni ni_zero(void) { return vi_set1(0); }
static inline vi ni_sum(ni acc) { return acc; }

static inline ni ni_dot4(ni acc, nq w, aq x) {
    return VI(_mm256_dpbusd_avx_epi32(acc.a, w.a, x), _mm256_dpbusd_avx_epi32(acc.b, w.b, x));
}

static inline ni ni_start(const uint8_t *p) {
    const __m256i sum = _mm256_madd_epi16(aq_load(p), _mm256_set1_epi16(1));
    return VI(sum, sum);
}

#define KERNELS kernels_avx2_vnni
#define KERNELS_NAME "avx2-vnni"
#else
typedef struct wq { __m256i a, b, size_a, size_b; } wq; /* w, |w| */
typedef struct ni { __m256i a, b; } ni;       /* 16-bit lanes, two of them a row: 8 x 2 x 15 x 127 fits, 4 x 2 x 32 x 127 too */

/* |w| times (x with the sign of w): two products, at most 128 x 127 each, fit 16 bits and nothing saturates. */
static inline wq wq_of(__m256i a, __m256i b) {
    const __m256i middle = _mm256_set1_epi8(-128);
    a = _mm256_xor_si256(a, middle), b = _mm256_xor_si256(b, middle);
    return (wq){a, b, _mm256_abs_epi8(a), _mm256_abs_epi8(b)};
}

static inline vi vi_dot4(vi acc, wq w, aq x) {
    const __m256i one = _mm256_set1_epi16(1);
    const __m256i a = _mm256_maddubs_epi16(w.size_a, _mm256_sign_epi8(x, w.a));
    const __m256i b = _mm256_maddubs_epi16(w.size_b, _mm256_sign_epi8(x, w.b));
    return VI(_mm256_add_epi32(acc.a, _mm256_madd_epi16(a, one)), _mm256_add_epi32(acc.b, _mm256_madd_epi16(b, one)));
}

static inline ni ni_zero(void) { return (ni){_mm256_setzero_si256(), _mm256_setzero_si256()}; }

static inline ni ni_start(const uint8_t *p) { return (ni){aq_load(p), aq_load(p)}; } /* sums wrap, and back */

static inline ni ni_dot4(ni acc, nq w, aq x) {
    return (ni){_mm256_add_epi16(acc.a, _mm256_maddubs_epi16(w.a, x)),
                _mm256_add_epi16(acc.b, _mm256_maddubs_epi16(w.b, x))};
}

static inline vi ni_sum(ni acc) {
    const __m256i one = _mm256_set1_epi16(1);
    return VI(_mm256_madd_epi16(acc.a, one), _mm256_madd_epi16(acc.b, one));
}

#define Q8_SIGNED 1
#define KERNELS kernels_avx2
#define KERNELS_NAME "avx2"
#endif

static inline wq wq_load(const uint8_t *p) { return wq_of(load_bytes(p), load_bytes(p + 32)); }

static inline wq wq_mxfp4(nq n) {
    const __m256i stored = _mm256_broadcastsi128_si256(_mm_xor_si128(_mm_setr_epi8(MXFP4_VALUES), _mm_set1_epi8(-128)));
    return wq_of(_mm256_shuffle_epi8(stored, n.a), _mm256_shuffle_epi8(stored, n.b));
}

#define KEEP(v) __asm__("" : "+x"((v).a), "+x"((v).b))
#define MATMUL_TILE 4
#define MATMUL_PANELS 4
#include "body.h"

#if defined(__clang__)
#pragma clang attribute pop
#endif
#else
typedef int no_avx2_here;
#endif
