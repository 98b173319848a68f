/* dispatch.c: which kernel sets exist, best first, and which of them this CPU runs. */
#include "kernels.h"

#if defined(__x86_64__)
#include <cpuid.h>

static bool has_f16c(void) /* clang does not know the name; the bit is in CPUID leaf 1 */
{
    unsigned int a, b, c, d;
    return __get_cpuid(1, &a, &b, &c, &d) != 0 && (c & bit_F16C) != 0;
}

static bool has_avx2(void)
{
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && has_f16c();
}

static bool has_avx512(void)
{
#if defined(COLIBRI_AVX512_HEADER)
    return true; /* emulated: for tests on any machine */
#else
    return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
           __builtin_cpu_supports("avx512vnni");
#endif
}
#endif

static bool always(void)
{
    return true;
}

const struct kernels *kernels_list(int index, bool *usable)
{
    static const struct { const struct kernels *kernels; bool (*usable)(void); } sets[] = {
#if defined(__x86_64__)
        {&kernels_avx512, has_avx512},
        {&kernels_avx2, has_avx2},
#endif
        {&kernels_scalar, always},
    };
    if (index < 0 || (size_t)index >= sizeof sets / sizeof sets[0]) return NULL;
    *usable = sets[index].usable();
    return sets[index].kernels;
}
