/* attend.h: attention of a tile of queries: a part of body.h, which includes it once for each instruction set.
 *
 * Keys and values of a block lie 16 side by side: of a key, element d of 16 neighbouring positions; of a value, 16
 * elements of one position. A score is one lane's sum over d, an output element one lane's sum over keys, blocks merge in
 * order (online softmax, Milakov and Gimelshein, arXiv:1805.02867): nothing depends on the tile or on how the prompt was
 * cut. Queries go four by four through registers; a tile of them finds each 16 keys or values in the first cache. */
struct attend_state {
    float max[ATTEND_TILE], sum[ATTEND_TILE];
    int32_t low[ATTEND_TILE];               /* keys of a block that lie before a query's first one */
    float p[ATTEND_TILE][KV_BLOCK];         /* scores of a block, then the weights made of them */
    float out[ATTEND_TILE * HEAD_DIM_MAX];  /* [n][roundup16(value_dim)] */
};

INLINE size_t attend_stride(const struct attend *a) { return attend_partial_floats(a->value_dim) - 2; }

/* What 16 keys from `key` on add to their scores for query j. */
INLINE vf attend_bias(const struct attend *a, int j, int32_t key) {
    const int32_t at = key - a->position[j], least = -a->bias_span, most = a->bias_span - 15;
    return vf_load(a->bias[j] + (at < least ? least : at > most ? most : at));
}

#define BY_TYPE(f, a, ...)                                         \
    if ((a)->half) BY_FOURS((a)->n, f, a, __VA_ARGS__, true); \
    else BY_FOURS((a)->n, f, a, __VA_ARGS__, false)

/* Vector i of the keys or values at p. */
INLINE vf attend_load(const uint8_t *p, size_t i, const bool half) {
    return half ? vf_f16(p + i * 32) : vf_load((const float *)(const void *)p + i * 16);
}

/* Scores of the 16 keys from `first` on in the block that begins with key `from`, for T queries from j on; lanes past a query's last key hold -3.4e38. */
INLINE void attend_scores(const struct attend *a, const uint8_t *keys, struct attend_state *s, const int32_t *n, int32_t from,
                          int32_t first, const bool half, int j, const int T) {
    const size_t k = (size_t)(first / 16) * (size_t)a->key_dim;
    vf acc[4];
    UNROLL for (int i = 0; i < T; i++) acc[i] = vf_set1(0);
    for (int32_t d = 0; d < a->key_dim; d++) {
        const vf key = attend_load(keys, k + (size_t)d, half);
        UNROLL for (int i = 0; i < T; i++) {
            acc[i] = vf_fma(key, vf_set1(a->q[j + i][d]), acc[i]);
            KEEP(acc[i]);
        }
    }
    UNROLL for (int i = 0; i < T; i++) {
        const int32_t left = n[j + i] - first, lanes = left < 0 ? 0 : left < 16 ? left : 16;
        vf score = vf_mul(acc[i], vf_set1(a->scale));
        if (a->bias_span > 0) score = vf_add(score, attend_bias(a, j + i, from + first));
        vf_store(s->p[j + i] + first, vf_first(score, lanes, -3.4e38f));
    }
}

/* Turns the scores of one query in one block into weights, 0 for the first `before` of the n; returns their maximum and
 * sum through the pointers. */
INLINE void attend_weights(float *p, int32_t before, int32_t n, float *max, float *sum) {
    const int32_t start = before & ~15;
    for (int32_t i = start; i < before; i++) p[i] = -3.4e38f;
    vf most = vf_load(p + start), low = vf_set1(0), high = vf_set1(0);
    for (int32_t i = start + 16; i < n; i += 16) most = vf_max(vf_load(p + i), most);
    *max = fold_max(most);
    const vf base = vf_set1(*max);
    for (int32_t i = start; i < n; i += 16) {
        vf e = vf_first(vf_exp(vf_sub(vf_load(p + i), base)), n - i < 16 ? n - i : 16, 0);
        if (i < before) e = vf_sub(e, vf_first(e, before - i, 0));
        if (i % 32 == 0) low = vf_add(low, e);
        else high = vf_add(high, e);
        vf_store(p + i, e);
    }
    *sum = fold_add(low, high);
}

/* 16 elements from d on of the sum over a block's keys of weight x value, merged into the state: T queries from j on. */
INLINE void attend_values(const struct attend *a, const uint8_t *values, struct attend_state *s, const int32_t *n,
                          const float *old_scale, const float *new_scale, int32_t d, const bool half, int j, const int T) {
    const size_t v = (size_t)(d / 16) * (size_t)a->block_positions;
    int32_t start = s->low[j], end = n[j]; /* keys that all of them see; then end is no less than start */
    UNROLL for (int i = 1; i < T; i++) {
        start = s->low[j + i] > start ? s->low[j + i] : start;
        end = n[j + i] < end ? n[j + i] : end;
    }
    end = end > start ? end : start;
    vf acc[4];
    UNROLL for (int i = 0; i < T; i++) {
        acc[i] = vf_set1(0);
        for (int32_t key = s->low[j + i]; key < start && key < n[j + i]; key++) {
            acc[i] = vf_fma(attend_load(values, v + (size_t)key, half), vf_set1(s->p[j + i][key]), acc[i]);
        }
    }
    for (int32_t key = start; key < end; key++) {
        const vf value = attend_load(values, v + (size_t)key, half);
        UNROLL for (int i = 0; i < T; i++) {
            acc[i] = vf_fma(value, vf_set1(s->p[j + i][key]), acc[i]);
            KEEP(acc[i]);
        }
    }
    UNROLL for (int i = 0; i < T; i++) {
        if (n[j + i] == 0) continue; /* sees nothing of this block */
        for (int32_t key = end; key < n[j + i]; key++) {
            acc[i] = vf_fma(attend_load(values, v + (size_t)key, half), vf_set1(s->p[j + i][key]), acc[i]);
        }
        float *const out = s->out + (size_t)(j + i) * attend_stride(a) + d;
        const vf old = vf_mul(vf_load(out), vf_set1(old_scale[j + i]));
        vf_store(out, vf_fma(acc[i], vf_set1(new_scale[j + i]), old));
    }
}

/* Takes a block's maximum and sum into a query's (0: the first block); the factors are those of what was there and of the block. */
INLINE void attend_join(float *max, float *sum, float block_max, float block_sum, float *old_scale, float *new_scale) {
    const float merged = *max > block_max ? *max : block_max;
    *old_scale = *sum == 0 ? 0 : kernel_exp(*max - merged);
    *new_scale = kernel_exp(block_max - merged);
    *sum = *sum * *old_scale + block_sum * *new_scale;
    *max = merged;
}

/* Divides a query's output by its sum, which a sink joins as a last block of one key without a value. */
INLINE void attend_end(float *to, const float *out, float max, float sum, const float *sink, int32_t value_dim) {
    float old_scale = 1, new_scale;
    if (sink != NULL) attend_join(&max, &sum, *sink, 1, &old_scale, &new_scale);
    const vf scale = vf_set1(old_scale), divisor = vf_set1(sum);
    for (int32_t d = 0; d < value_dim; d += 16) store_at(to, d, value_dim, vf_div(vf_mul(vf_load(out + d), scale), divisor));
}

/* Scores and weights of a block; returns through n where what each query sees of it ends, 0: it sees nothing. */
INLINE const uint8_t *attend_enter(const struct attend *a, struct attend_state *s, int32_t from, int32_t *n, float *max, float *sum) {
    const uint8_t *const block = a->pool + (size_t)a->table[from / KV_BLOCK] * a->block_bytes;
    int32_t least = KV_BLOCK, most = 0;
    for (int j = 0; j < a->n; j++) {
        const bool seen = a->n_keys[j] > from && a->first_key[j] < from + KV_BLOCK;
        n[j] = !seen ? 0 : a->n_keys[j] - from < KV_BLOCK ? a->n_keys[j] - from : KV_BLOCK;
        s->low[j] = seen && a->first_key[j] > from ? a->first_key[j] - from : 0;
        least = seen && s->low[j] < least ? s->low[j] : least;
        most = n[j] > most ? n[j] : most;
    }
    for (int32_t first = least & ~15; first < most; first += 16) {
        BY_TYPE(attend_scores, a, block + a->k_offset, s, n, from, first);
    }
    for (int j = 0; j < a->n; j++) {
        if (n[j] > 0) attend_weights(s->p[j], s->low[j], n[j], &max[j], &sum[j]);
    }
    return block + a->v_offset;
}

static void kernel_attend(const struct attend *a, int32_t block) {
    struct attend_state s;
    const size_t floats = attend_stride(a);
    int32_t first = block < 0 ? INT32_MAX : block * KV_BLOCK, last = block < 0 ? 0 : first + 1;
    for (int j = 0; j < a->n; j++) {
        s.max[j] = -3.4e38f;
        s.sum[j] = 0;
        if (block < 0 && a->first_key[j] < first) first = a->first_key[j];
        if (block < 0 && a->n_keys[j] > last) last = a->n_keys[j];
    }
    for (size_t i = 0; i < (size_t)a->n * floats; i++) s.out[i] = -0.0f; /* the one number that adds nothing, not even a sign */
    for (int32_t from = first & ~(KV_BLOCK - 1); from < last; from += KV_BLOCK) {
        int32_t n[ATTEND_TILE] = {0};
        float max[ATTEND_TILE], sum[ATTEND_TILE], old_scale[ATTEND_TILE], new_scale[ATTEND_TILE];
        const uint8_t *const values = attend_enter(a, &s, from, n, max, sum);
        for (int j = 0; j < a->n; j++) {
            if (n[j] > 0) attend_join(&s.max[j], &s.sum[j], max[j], sum[j], &old_scale[j], &new_scale[j]);
        }
        for (int32_t d = 0; d < a->value_dim; d += 16) BY_TYPE(attend_values, a, values, &s, n, old_scale, new_scale, d);
    }
    for (int j = 0; j < a->n; j++) {
        const float *const out = s.out + (size_t)j * floats;
        if (block < 0) attend_end(a->out[j], out, s.max[j], s.sum[j], a->sink[j], a->value_dim);
        if (block < 0 || s.sum[j] == 0) continue;
        a->partial[j][0] = s.max[j];
        a->partial[j][1] = s.sum[j];
        memcpy(a->partial[j] + 2, out, floats * sizeof *out);
    }
}

static void kernel_attend_merge(const float *partials, int32_t n_blocks, int32_t value_dim, const float *sink, float *to) {
    float max = -3.4e38f, sum = 0, out[HEAD_DIM_MAX], old_scale, new_scale;
    const size_t floats = attend_partial_floats(value_dim);
    for (size_t d = 0; d < floats - 2; d++) out[d] = -0.0f;
    for (int32_t b = 0; b < n_blocks; b++, partials += floats) {
        attend_join(&max, &sum, partials[0], partials[1], &old_scale, &new_scale);
        for (size_t d = 0; d < floats - 2; d += 16) {
            const vf old = vf_mul(vf_load(out + d), vf_set1(old_scale));
            vf_store(out + d, vf_fma(vf_load(partials + 2 + d), vf_set1(new_scale), old));
        }
    }
    attend_end(to, out, max, sum, sink, value_dim);
}
