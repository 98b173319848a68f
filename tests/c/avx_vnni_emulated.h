/* avx_vnni_emulated.h: the one AVX-VNNI intrinsic of core/kernels/avx2.c on a machine with AVX2 alone, for tests: in each
 * 32-bit lane acc + the sum of four products of unsigned bytes of a and signed bytes of b, nothing saturated. */
#ifndef AVX_VNNI_EMULATED_H
#define AVX_VNNI_EMULATED_H

#include <immintrin.h>

#define _mm256_dpbusd_avx_epi32 emulated_dpbusd /* the compiler's own header may declare the name */

/* Products of one quarter: byte `at` of each lane. */
#define QUARTER(at)                                                                                            \
    _mm256_mullo_epi32(_mm256_and_si256(_mm256_srli_epi32(a, 8 * (at)), _mm256_set1_epi32(255)),               \
                       _mm256_srai_epi32(_mm256_slli_epi32(b, 24 - 8 * (at)), 24))

static inline __m256i emulated_dpbusd(__m256i acc, __m256i a, __m256i b) {
    const __m256i low = _mm256_add_epi32(QUARTER(0), QUARTER(1)), high = _mm256_add_epi32(QUARTER(2), QUARTER(3));
    return _mm256_add_epi32(acc, _mm256_add_epi32(low, high));
}

#undef QUARTER
#endif
