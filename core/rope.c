/* rope.c: own sine and cosine in double: libm's differ between versions and CPUs. Angles are rounded to f32 first, as
 * the reference implementations do. */
#include "rope.h"

/* sin and cos of |x| < 2^31: x = k pi/2 + r with pi/2 in two pieces, the first of 33 bits, so that k times it is exact
 * for |k| < 2^20 and wrong by less than 2^-22 beyond; Taylor to r^15 on |r| <= pi/4. */
static void sine_cosine(double x, double *sine, double *cosine) {
    const double magic = 6755399441055744.0; /* 1.5 x 2^52: adding it rounds to an integer */
    const double k = (x * 0.63661977236758134308 + magic) - magic;
    const double r = (x - k * 1.57079632673412561417) - k * 6.07710050650619224932e-11;
    const double z = r * r;
    const double s = r + r * z * (-1.0 / 6 + z * (1.0 / 120 + z * (-1.0 / 5040 + z * (1.0 / 362880 +
                     z * (-1.0 / 39916800 + z * (1.0 / 6227020800 + z * (-1.0 / 1307674368000)))))));
    const double c = 1 + z * (-0.5 + z * (1.0 / 24 + z * (-1.0 / 720 + z * (1.0 / 40320 + z * (-1.0 / 3628800 +
                     z * (1.0 / 479001600 + z * (-1.0 / 87178291200)))))));
    const int64_t quadrant = (int64_t)k & 3;
    *sine = quadrant == 0 ? s : quadrant == 1 ? c : quadrant == 2 ? -s : -c;
    *cosine = quadrant == 0 ? c : quadrant == 1 ? -s : quadrant == 2 ? -c : s;
}

void rope_table(const float *inv_freq, int32_t n, int32_t position, float scale, float *cosine, float *sine) {
    for (int32_t i = 0; i < n; i++) {
        double s, c;
        const float angle = (float)position * inv_freq[i];
        sine_cosine((double)angle, &s, &c);
        cosine[i] = (float)c * scale;
        sine[i] = (float)s * scale;
    }
}
