/* neon_dotprod.c: the kernel set for 64-bit ARM with dot product instructions (Cortex-A55 and A75, Neoverse, every Apple
 * M): neon.c with another integer product. Where a compiler lacks them it holds nothing. */
#define NEON_DOTPROD
#include "neon.c"
