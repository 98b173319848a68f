/* avx512.c: the kernel set for x86-64 with AVX-512 F, BW, DQ, VL and VNNI (Ice Lake, Zen 4 on). Sixteen lanes are one
 * register. COLIBRI_AVX512_HEADER names a header that emulates the intrinsics, so that tests can run on any machine. */
#include "kernels.h"

#if defined(__x86_64__)
#if defined(COLIBRI_AVX512_HEADER)
#include COLIBRI_AVX512_HEADER
#else
TARGET("avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")
#include <immintrin.h>
#endif

#define REGISTER 64
#include "lanes.h"

typedef vi wq;

INLINE vf vf_fma(vf a, vf b, vf c) { return _mm512_fmadd_ps(a, b, c); }
INLINE vf vf_max(vf a, vf b) { return _mm512_max_ps(a, b); }
INLINE vf vf_min(vf a, vf b) { return _mm512_min_ps(a, b); }
INLINE vi vi_round(vf v) { return (vi)_mm512_cvtps_epi32(v); }
INLINE wq wq_load(const uint8_t *p) { return vi_load(p); }
INLINE vi vi_dot4(vi acc, wq w, aq a) { return (vi)_mm512_dpbusd_epi32((__m512i)acc, (__m512i)w, (__m512i)a); }
INLINE vf vf_f16(const uint8_t *p) { return _mm512_cvtph_ps(_mm256_loadu_si256((const void *)p)); }
INLINE vf vf_i8(const uint8_t *p) { return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const void *)p))); }

INLINE wq wq_mxfp4(nq n) {
    const __m128i stored = _mm_xor_si128(_mm_setr_epi8(MXFP4_VALUES), _mm_set1_epi8(-128));
    return (wq)_mm512_shuffle_epi8(_mm512_broadcast_i32x4(stored), (__m512i)n);
}

INLINE vf vf_first(vf v, int n, float fill) {
    return _mm512_mask_blend_ps((__mmask16)((1u << n) - 1), _mm512_set1_ps(fill), v);
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

#if !defined(COLIBRI_AVX512_HEADER)
TARGET_END
#endif
#endif
