/* delta_rule.h: the short convolution and the gated delta rule: a part of body.h, which includes it once for each
 * instruction set. */

static void kernel_convolve(float *x, size_t stride, int32_t n, int32_t cols, const float *weight, size_t w_stride,
                            int32_t width, float *past, bool silu) {
    for (int32_t row = 0; row < n; row++, x += stride) {
        for (int32_t i = 0; i < cols; i += 16) {
            vf sum = vf_set1(0);
            for (int32_t j = 0; j < width; j++) {
                const vf before = load_at(j == width - 1 ? x : past + (size_t)j * (size_t)cols, i, cols);
                sum = vf_fma(before, load_at(weight + (size_t)j * w_stride, i, cols), sum);
                if (j > 0) store_at(past + (size_t)(j - 1) * (size_t)cols, i, cols, before);
            }
            store_at(x, i, cols, silu ? vf_sigmoid_mul(sum, sum) : sum);
        }
    }
}

/* T times 16 lanes of the state, which stay in the first cache over all rows. A lane's sums run over key_dim upwards. */
INLINE void delta_lanes(const struct delta *d, int32_t first, const int T) {
    const size_t tile = (size_t)d->key_dim * 16;
    const vf scale = vf_set1(1.0f / __builtin_sqrtf((float)d->key_dim)), one = vf_set1(1), rate = vf_exp(vf_set1(d->log_rate));
    float *const state = d->state + (size_t)first * tile;
    for (size_t at = 0; at < (size_t)d->n * d->stride; at += d->stride) {
        const float *const q = d->q + at, *const k = d->k + at;
        float *const v = d->v + at + first * 16;
        const vf beta = vf_mul(vf_sigmoid_mul(one, vf_set1(d->beta[at])), scale);
        const vf decay = vf_exp(vf_mul(vf_sub(vf_set1(0), rate), vf_softplus(vf_set1(d->decay[at] + d->bias))));
        vf step[4], out[4];
        UNROLL for (int t = 0; t < T; t++) step[t] = out[t] = vf_set1(0);
        for (int32_t i = 0; i < d->key_dim; i++) {
            UNROLL for (int t = 0; t < T; t++) {
                step[t] = vf_fma(vf_load(state + (size_t)t * tile + (size_t)i * 16), vf_set1(k[i]), step[t]);
                KEEP(step[t]);
            }
        }
        UNROLL for (int t = 0; t < T; t++) {
            const vf held = vf_mul(vf_mul(step[t], decay), scale);
            step[t] = vf_mul(vf_sub(load_at(v, t * 16, d->value_dim - first * 16), held), beta);
        }
        for (int32_t i = 0; i < d->key_dim; i++) {
            UNROLL for (int t = 0; t < T; t++) {
                float *const s = state + (size_t)t * tile + (size_t)i * 16;
                const vf next = vf_fma(step[t], vf_set1(k[i]), vf_mul(vf_load(s), decay));
                vf_store(s, next);
                out[t] = vf_fma(next, vf_set1(q[i]), out[t]);
                KEEP(out[t]);
            }
        }
        UNROLL for (int t = 0; t < T; t++) store_at(v, t * 16, d->value_dim - first * 16, vf_mul(vf_mul(out[t], scale), scale));
    }
}

static void kernel_delta(const struct delta *d) {
    BY_FOURS((d->value_dim + 15) / 16, delta_lanes, d);
}
