/* elementwise.h: what is done to a row of floats: functions of its elements, norms, softmax, rotation, quantisation: a part
 * of body.h, which includes it once for each instruction set. */

/* e^x: x = n ln 2 + r with |r| <= ln 2 / 2, Taylor to r^7 (relative error below 1e-7). Saturates at both ends so that
 * the result stays a normal number; NaN stays NaN. */
INLINE vf vf_exp(vf x) {
    const vf magic = vf_set1(12582912.0f); /* 1.5 x 2^23: adding it rounds to an integer */
    x = vf_min(vf_set1(88.0f), vf_max(vf_set1(-86.6f), x));
    const vf n = vf_sub(vf_fma(x, vf_set1(1.44269504088896341f), magic), magic);
    vf r = vf_fma(n, vf_set1(-0.693359375f), x); /* ln 2 in two pieces, the first exact in 9 bits */
    r = vf_fma(n, vf_set1(2.12194440e-4f), r);
    vf p = vf_set1(1.0f / 5040);
    p = vf_fma(p, r, vf_set1(1.0f / 720));
    p = vf_fma(p, r, vf_set1(1.0f / 120));
    p = vf_fma(p, r, vf_set1(1.0f / 24));
    p = vf_fma(p, r, vf_set1(1.0f / 6));
    p = vf_fma(p, r, vf_set1(0.5f));
    p = vf_fma(p, r, vf_set1(1.0f));
    p = vf_fma(p, r, vf_set1(1.0f));
    return vf_of(vi_add(vi_of(p), vi_left(vi_round(n), 23))); /* p 2^n */
}

static float kernel_exp(float x) {
    float lane[16];
    vf_store(lane, vf_exp(vf_set1(x)));
    return lane[0];
}

/* a sigmoid(x) */
INLINE vf vf_sigmoid_mul(vf a, vf x) {
    return vf_div(a, vf_add(vf_set1(1), vf_exp(vf_sub(vf_set1(0), x))));
}

/* ln(1 + e^x) = max(x, 0) + 2 artanh(s), s = u / (2 + u), u = e^-|x|: series to s^15 (relative error below 1e-8). */
INLINE vf vf_softplus(vf x) {
    const vf u = vf_exp(vf_min(x, vf_sub(vf_set1(0), x))), s = vf_div(u, vf_add(vf_set1(2), u)), z = vf_mul(s, s);
    vf p = vf_set1(2.0f / 15);
    for (int i = 13; i > 0; i -= 2) p = vf_fma(p, z, vf_set1(2.0f / (float)i));
    return vf_fma(p, s, vf_max(x, vf_set1(0)));
}

static void kernel_silu_mul(float *gate, const float *up, int32_t n, float limit, float alpha, float cubic, float offset) {
    const vf zero = vf_set1(0), factor = vf_set1(alpha);
    const vf most = vf_set1(limit > 0 ? limit : __builtin_inff()), least = vf_sub(zero, most);
    const vf added = vf_set1(offset == 0 ? -0.0f : offset); /* the one number that adds nothing, not even a sign */
    for (int32_t i = 0; i < n; i += 16) {
        const vf g = vf_min(most, load_at(gate, i, n)), u = vf_max(least, vf_min(most, load_at(up, i, n)));
        const vf bent = vf_fma(vf_mul(vf_mul(vf_set1(cubic), g), g), g, g); /* g itself where cubic is 0 */
        store_at(gate, i, n, vf_mul(vf_sigmoid_mul(g, vf_mul(factor, bent)), vf_add(u, added)));
    }
}

static void kernel_sigmoid_mul(float *y, const float *x, int32_t n) {
    for (int32_t i = 0; i < n; i += 16) store_at(y, i, n, vf_sigmoid_mul(load_at(y, i, n), load_at(x, i, n)));
}

INLINE float largest(const float *x, int32_t n) {
    vf most = vf_set1(x[0]);
    for (int32_t i = 0; i < n; i += 16) {
        most = vf_max(n - i < 16 ? vf_first(load_at(x, i, n), n - i, x[0]) : vf_load(x + i), most);
    }
    return fold_max(most);
}

static int32_t kernel_argmax(const float *x, int32_t n) {
    const float most = largest(x, n);
    int32_t i = 0;
    while (i < n - 1 && x[i] != most) i++;
    return i;
}

static void kernel_softmax(float *x, int32_t n) {
    vf low = vf_set1(0), high = vf_set1(0);
    const vf max = vf_set1(largest(x, n));
    for (int32_t i = 0; i < n; i += 16) {
        const int32_t left = n - i < 16 ? n - i : 16;
        const vf e = vf_first(vf_exp(vf_sub(load_at(x, i, n), max)), left, 0);
        if (i % 32 == 0) low = vf_add(low, e);
        else high = vf_add(high, e);
        store_at(x, i, n, e);
    }
    const vf sum = vf_set1(fold_add(low, high));
    for (int32_t i = 0; i < n; i += 16) store_at(x, i, n, vf_div(load_at(x, i, n), sum));
}

static void kernel_rms_norm(float *out, const float *x, const float *weight, int32_t n, float eps) {
    const float mean = kernel_dot(x, x, n) / (float)n;
    const vf scale = vf_set1(1.0f / __builtin_sqrtf(mean + eps));
    for (int32_t i = 0; i < n; i += 16) {
        const vf y = vf_mul(load_at(x, i, n), scale);
        store_at(out, i, n, weight == NULL ? y : vf_mul(y, load_at(weight, i, n)));
    }
}

static void kernel_soft_cap(float *x, float cap, int32_t n) {
    const vf most = vf_set1(cap), twice = vf_set1(2 * cap), slope = vf_set1(2 / cap);
    for (int32_t i = 0; i < n; i += 16) {
        const vf e = vf_exp(vf_mul(slope, load_at(x, i, n)));
        store_at(x, i, n, vf_sub(most, vf_div(twice, vf_add(vf_set1(1), e))));
    }
}

static void kernel_centre(float *out, const float *x, int32_t n) {
    vf low = vf_set1(0), high = vf_set1(0);
    for (int32_t i = 0; i < n; i += 32) {
        low = vf_add(load_at(x, i, n), low);
        high = vf_add(load_at(x, i + 16, n), high);
    }
    const vf mean = vf_set1(fold_add(low, high) / (float)n);
    for (int32_t i = 0; i < n; i += 16) store_at(out, i, n, vf_sub(load_at(x, i, n), mean));
}

static void kernel_rotate(float *x, const float *cosine, const float *sine, int32_t dim) {
    const int32_t half = dim / 2;
    for (int32_t i = 0; i < half; i += 16) {
        const vf a = load_at(x, i, half), b = load_at(x + half, i, half);
        const vf c = load_at(cosine, i, half), s = load_at(sine, i, half);
        store_at(x, i, half, vf_sub(vf_mul(a, c), vf_mul(b, s)));
        store_at(x + half, i, half, vf_add(vf_mul(b, c), vf_mul(a, s)));
    }
}

static void kernel_add_scaled(float *y, const float *x, float a, int32_t n) {
    const vf factor = vf_set1(a);
    for (int32_t i = 0; i < n; i += 16) store_at(y, i, n, vf_fma(factor, load_at(x, i, n), load_at(y, i, n)));
}

static void kernel_clamp(float *x, float least, float most, int32_t n) {
    for (int32_t i = 0; i < n; i += 16) store_at(x, i, n, vf_min(vf_set1(most), vf_max(vf_set1(least), load_at(x, i, n))));
}

static bool kernel_all_finite(const float *x, int64_t n) {
    vf sum = vf_set1(0); /* x * 0 is NaN where x is not finite */
    for (int64_t i = 0; i < n; i += 16) {
        const int32_t left = n - i < 16 ? (int32_t)(n - i) : 16;
        sum = vf_fma(load_at(x + i, 0, left), vf_set1(0), sum);
    }
    return fold_add(sum, vf_set1(0)) == 0;
}

static void kernel_quantize(const float *x, int32_t n, int32_t first, int32_t count, uint8_t *row) {
    float *const scales = (float *)(void *)(row + q8_scales_at((size_t)n));
    int32_t *const offsets = (int32_t *)(void *)(row + q8_offsets_at((size_t)n));
    float *const sums = (float *)(void *)(row + q8_sums_at((size_t)n));
    int16_t *const starts = (int16_t *)(void *)(row + q8_starts_at((size_t)n));
    const vf zero = vf_set1(0);
    for (int32_t g = first; g < first + count; g++) {
        const int32_t at = (g - first) * Q8_GROUP, end = n - first * Q8_GROUP;
        const vf low = load_at(x, at, end), high = load_at(x, at + 16, end);
        const vf size = vf_max(vf_max(low, vf_sub(zero, low)), vf_max(high, vf_sub(zero, high)));
        const float most = fold_max(size);
        const float taint = fold_add(vf_mul(low, zero), vf_mul(high, zero)); /* 0, or NaN if not all are finite */
        const vf inverse = vf_set1(most > 0 && most + taint < __builtin_inff() ? 127.0f / most : 0);
        const vf magic = vf_set1(12582912.0f);
        const vf limit = vf_set1(127), minimum = vf_set1(-127);
        vf ql = vf_sub(vf_add(vf_mul(low, inverse), magic), magic);
        vf qh = vf_sub(vf_add(vf_mul(high, inverse), magic), magic);
        ql = vf_max(vf_min(ql, limit), minimum); /* NaN quants become 127: the scale tells */
        qh = vf_max(vf_min(qh, limit), minimum);
        int8_t *const q = (int8_t *)row + g * Q8_GROUP;
        float lane[Q8_GROUP];
        int32_t sum = 0;
        vf_store(lane, ql);
        vf_store(lane + 16, qh);
        for (int k = 0; k < Q8_GROUP; k++) q[k] = (int8_t)lane[k];
        for (int k = 0; k < 8; k++) lane[k] += lane[k + 8], lane[k + 16] += lane[k + 24]; /* small integers: exact */
        for (int i = 0; i < 4; i++) {
            const float *const pair = lane + i / 2 * 16 + i % 2 * 2;
            const int32_t part = (int32_t)(pair[0] + pair[1] + pair[4] + pair[5]);
            starts[g * 4 + i] = (int16_t)(-32 * part);
            sum += part;
        }
        scales[g] = most / 127.0f + taint;
        offsets[g] = -128 * sum;
        sums[g] = scales[g] * (float)sum;
    }
}
