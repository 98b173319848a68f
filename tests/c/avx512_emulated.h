/* avx512_emulated.h: the AVX-512 intrinsics of core/kernels/avx512.c on a machine without them, for tests. SIMDe (Debian
 * package libsimde-dev) gives most; the six that version 0.7.4 lacks follow, lane by lane as Intel's manual says. */
#ifndef AVX512_EMULATED_H
#define AVX512_EMULATED_H

#define SIMDE_ENABLE_NATIVE_ALIASES
#include <simde/x86/avx512.h>
#include <simde/x86/f16c.h>
#include <math.h>
#include <string.h>

typedef simde__mmask16 __mmask16;

static inline __m512 _mm512_cvtepi32_ps(__m512i v) {
    int32_t from[16];
    float to[16];
    memcpy(from, &v, sizeof from);
    for (int i = 0; i < 16; i++) to[i] = (float)from[i];
    return _mm512_loadu_ps(to);
}

static inline __m512i _mm512_cvtps_epi32(__m512 v) {
    float from[16];
    int32_t to[16];
    memcpy(from, &v, sizeof from);
    for (int i = 0; i < 16; i++) { /* out of range and NaN: the "integer indefinite" value */
        to[i] = from[i] >= -2147483648.0f && from[i] < 2147483648.0f ? (int32_t)lrintf(from[i]) : INT32_MIN;
    }
    return _mm512_loadu_si512(to);
}

static inline __m512 _mm512_cvtph_ps(__m256i v) {
    uint16_t from[16];
    float to[16];
    memcpy(from, &v, sizeof from);
    for (int i = 0; i < 16; i++) to[i] = simde_float16_to_float32(simde_uint16_as_float16(from[i]));
    return _mm512_loadu_ps(to);
}

static inline __m128i _mm512_cvtepi32_epi8(__m512i v) {
    int32_t from[16];
    int8_t to[16];
    memcpy(from, &v, sizeof from);
    for (int i = 0; i < 16; i++) to[i] = (int8_t)from[i];
    return _mm_loadu_si128((const __m128i *)(const void *)to);
}

static inline __m512i _mm512_cvtepi8_epi32(__m128i v) {
    int8_t from[16];
    int32_t to[16];
    memcpy(from, &v, sizeof from);
    for (int i = 0; i < 16; i++) to[i] = from[i];
    return _mm512_loadu_si512(to);
}

#endif
