/* avx2_vnni.c: the kernel set for x86-64 with AVX2 and AVX-VNNI (Alder Lake and Sierra Forest on): avx2.c with another
 * integer product. Where a compiler lacks it, this file holds nothing. COLIBRI_AVX_VNNI_HEADER names a header that
 * emulates the instruction, so that tests can run on any machine with AVX2. */
#include "kernels.h"

#if defined(COLIBRI_HAS_AVX2_VNNI)
#define AVX2_VNNI
#include "avx2.c"
#endif
