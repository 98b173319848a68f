/* avx512.c: the kernel set for x86-64 with AVX-512 F, BW, DQ, VL and VNNI (Ice Lake, Zen 4 on). Sixteen lanes are one
 * register. COLIBRI_AVX512_HEADER names a header that emulates the intrinsics, so that tests can run on any machine. */
#if defined(__x86_64__)
#if defined(COLIBRI_AVX512_HEADER)
#include COLIBRI_AVX512_HEADER
#else
#if defined(__clang__)
#pragma clang attribute push( \
    __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c"))), apply_to = function)
#elif defined(__GNUC__)
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")
#endif
#include <immintrin.h>
#endif

#include "kernels.h"
#include <stdint.h>
#include <string.h>

typedef __m512 vf;
typedef __m512i vi;
typedef __m512i wq;
typedef __m512i aq;
typedef __m512i nq;
typedef __m512i ni;

static inline vf vf_load(const float *p) { return _mm512_loadu_ps(p); }
static inline void vf_store(float *p, vf v) { _mm512_storeu_ps(p, v); }
static inline vf vf_set1(float x) { return _mm512_set1_ps(x); }
static inline vf vf_add(vf a, vf b) { return _mm512_add_ps(a, b); }
static inline vf vf_sub(vf a, vf b) { return _mm512_sub_ps(a, b); }
static inline vf vf_mul(vf a, vf b) { return _mm512_mul_ps(a, b); }
static inline vf vf_div(vf a, vf b) { return _mm512_div_ps(a, b); }
static inline vf vf_fma(vf a, vf b, vf c) { return _mm512_fmadd_ps(a, b, c); }
static inline vf vf_max(vf a, vf b) { return _mm512_max_ps(a, b); }
static inline vf vf_min(vf a, vf b) { return _mm512_min_ps(a, b); }
static inline vi vi_set1(int32_t x) { return _mm512_set1_epi32(x); }
static inline vf vf_from_vi(vi v) { return _mm512_cvtepi32_ps(v); }
static inline vi vi_round(vf v) { return _mm512_cvtps_epi32(v); }
static inline wq wq_load(const uint8_t *p) { return _mm512_loadu_si512(p); }
static inline vi vi_dot4(vi acc, wq w, aq a) { return _mm512_dpbusd_epi32(acc, w, a); }

static inline vi vi_load(const uint8_t *p) { return _mm512_loadu_si512(p); }
static inline ni ni_zero(void) { return _mm512_setzero_si512(); }
static inline ni ni_dot4(ni acc, nq w, aq a) { return _mm512_dpbusd_epi32(acc, w, a); }
static inline vi ni_sum(ni acc) { return acc; }

static inline vi vi_bits(vi v, int shift, int n) {
    return _mm512_and_si512(_mm512_srli_epi32(v, (unsigned int)shift), _mm512_set1_epi32((1 << n) - 1));
}

static inline nq nq_bits(const uint8_t *p, unsigned shift, char mask) {
    return _mm512_and_si512(_mm512_srli_epi16(_mm512_loadu_si512(p), shift), _mm512_set1_epi8(mask));
}

static inline nq nq_or(nq x, nq y) { return _mm512_or_si512(x, y); }

static inline wq wq_mxfp4(nq n) {
    const __m128i stored = _mm_xor_si128(_mm_setr_epi8(MXFP4_VALUES), _mm_set1_epi8(-128));
    return _mm512_shuffle_epi8(_mm512_broadcast_i32x4(stored), n);
}

static inline vf vf_first(vf v, int n, float fill) {
    return _mm512_mask_blend_ps((__mmask16)((1u << n) - 1), _mm512_set1_ps(fill), v);
}

static inline vf vf_times_pow2(vf v, vf n) {
    return _mm512_castsi512_ps(_mm512_add_epi32(_mm512_castps_si512(v), _mm512_slli_epi32(_mm512_cvtps_epi32(n), 23)));
}

static inline vf vf_f16(const uint8_t *p) {
    return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)(const void *)p));
}

static inline void vf_bf16_pair(const uint8_t *p, vf *even, vf *odd) {
    const __m512i pair = _mm512_loadu_si512(p);
    *even = _mm512_castsi512_ps(_mm512_slli_epi32(pair, 16));
    *odd = _mm512_castsi512_ps(_mm512_and_si512(pair, _mm512_set1_epi32((int)0xffff0000u)));
}

static inline vf vf_i8(const uint8_t *p) { return vf_from_vi(_mm512_cvtepi8_epi32(_mm_loadu_si128((const void *)p))); }

static inline void vi_store_i8(int8_t *p, vi v) {
    _mm_storeu_si128((__m128i *)(void *)p, _mm512_cvtepi32_epi8(v));
}

static inline aq aq_load(const uint8_t *p) {
    int32_t quad;
    memcpy(&quad, p, sizeof quad);
    return _mm512_set1_epi32(quad);
}

static inline ni ni_start(const uint8_t *p) {
    int16_t half[2];
    memcpy(half, p, sizeof half);
    return vi_set1(half[0] + half[1]);
}

#ifdef COLIBRI_AVX512_HEADER
#define KEEP(v) ((void)0) /* emulated: no registers of this size */
#else
#define KEEP(v) __asm__("" : "+v"(v))
#endif
#define MATMUL_TILE 8
#define MATMUL_PANELS 4
#define KERNELS kernels_avx512
#define KERNELS_NAME "avx512"
#include "body.h"

#if defined(__clang__) && !defined(COLIBRI_AVX512_HEADER)
#pragma clang attribute pop
#endif
#else
typedef int no_avx512_here;
#endif
