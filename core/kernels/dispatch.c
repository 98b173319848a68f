/* dispatch.c: which kernel sets exist, best first, and which of them this CPU runs. */
#include "kernels.h"

#if defined(__x86_64__)
#include <cpuid.h>

static bool has_f16c(void) /* clang does not know the name; the bit is in CPUID leaf 1 */
{
    unsigned int a, b, c, d;
    return __get_cpuid(1, &a, &b, &c, &d) != 0 && (c & bit_F16C) != 0;
}

static bool has_avx2(void) {
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && has_f16c();
}

#if defined(COLIBRI_HAS_AVX2_VNNI)
static bool has_avx2_vnni(void) /* older compilers do not know the name: CPUID leaf 7, subleaf 1 */
{
#if defined(COLIBRI_AVX_VNNI_HEADER)
    return has_avx2(); /* emulated: for tests on any machine with AVX2 */
#else
    unsigned int a, b, c, d;
    return has_avx2() && __get_cpuid_count(7, 0, &a, &b, &c, &d) != 0 && a >= 1 &&
           __get_cpuid_count(7, 1, &a, &b, &c, &d) != 0 && (a & 1u << 4) != 0;
#endif
}
#endif

static bool has_avx512(void) {
#if defined(COLIBRI_AVX512_HEADER)
    return true; /* emulated: for tests on any machine */
#else
    return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
           __builtin_cpu_supports("avx512vnni");
#endif
}
#endif

#if defined(COLIBRI_HAS_NEON_DOTPROD)
#if defined(__linux__)
#include <sys/auxv.h>
#endif

static bool has_dotprod(void) {
#if defined(__ARM_FEATURE_DOTPROD) || defined(__APPLE__)
    return true;
#elif defined(__linux__)
    return (getauxval(AT_HWCAP) & 1ul << 20) != 0; /* HWCAP_ASIMDDP, which old headers lack */
#else
    return false;
#endif
}
#endif

const struct kernels *kernels_list(int index, bool *usable) {
    static const struct { const struct kernels *kernels; bool (*usable)(void); } sets[] = { /* NULL: everywhere */
#if defined(__x86_64__)
        {&kernels_avx512, has_avx512},
#if defined(COLIBRI_HAS_AVX2_VNNI)
        {&kernels_avx2_vnni, has_avx2_vnni},
#endif
        {&kernels_avx2, has_avx2},
#elif defined(__aarch64__)
#if defined(COLIBRI_HAS_NEON_DOTPROD)
        {&kernels_neon_dotprod, has_dotprod},
#endif
        {&kernels_neon, NULL},
#endif
        {&kernels_scalar, NULL},
    };
    if (index < 0 || (size_t)index >= sizeof sets / sizeof sets[0]) return NULL;
    *usable = sets[index].usable == NULL || sets[index].usable();
    return sets[index].kernels;
}
