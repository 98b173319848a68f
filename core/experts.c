/* experts.c: the cache of routed experts. Owns its slots, which expert leaves for another, and the reads; refuses nothing:
 * a cache of one slot works, turn by turn. A turn is the use of some experts of a layer; they stay in their slots meanwhile.
 * LRU: the expert used longest ago leaves. LFRU: a use counts, up to 31; now and then all counts are halved; experts whose
 * counts have as many binary digits are on a level; of the lowest level leaves the one nearest before the end of the layer at
 * hand: layers come in turn, so that the layers just left are needed last. docs/RESIDENCY.md has what that hits. */
#include "experts.h"

#include <string.h>

/* How many reads an expert takes. */
static int32_t pieces(const struct experts *e) {
    return (int32_t)((e->slot_bytes + e->read_bytes - 1) / e->read_bytes);
}

void experts_layout(struct experts *e, struct arena *arena, const colibri_model *model, const colibri_params *p, void **stacks) {
    const uint64_t slots = (uint64_t)p->expert_slots, all = slots > 0 ? (uint64_t)model->n_experts : 0;
    const uint64_t groups = slots > 0 ? (uint64_t)config_max_experts(&model->config) + 1 : 0;
    e->model = model;
    e->n_slots = p->expert_slots;
    e->lru = p->expert_policy == COLIBRI_LRU;
    e->traffic = p->traffic;
    e->slot_bytes = 0;
    for (int32_t i = 0; i < model->n_experts; i++) {
        const uint64_t bytes = (ffn_bytes(&model->experts[i]) + OS_PAGE - 1) & ~(uint64_t)(OS_PAGE - 1);
        if (bytes > e->slot_bytes) e->slot_bytes = bytes;
    }
    for (e->read_bytes = 1024 * 1024; e->slot_bytes / e->read_bytes >= 1024;) e->read_bytes *= 2;
    e->n_words = model->n_experts / 64 + 1;
    e->places = arena_take(arena, slots > 0 ? slots + 1 : 0, sizeof *e->places);
    e->levels = arena_take(arena, slots > 0 ? EXPERT_LEVELS : 0, (uint64_t)e->n_words * sizeof *e->levels);
    e->slot_of = arena_take(arena, all, sizeof *e->slot_of);
    e->uses = arena_take(arena, all, sizeof *e->uses);
    e->groups = arena_take(arena, groups, sizeof *e->groups);
    e->missing = arena_take(arena, groups, sizeof *e->missing);
    threads_layout(&e->lanes, arena, slots > 0 ? p->lanes + 1 : 1, stacks);
}

void experts_memory(struct experts *e, struct arena *arena) {
    arena->used = (arena->used + OS_PAGE - 1) & ~(uint64_t)(OS_PAGE - 1);
    e->memory = arena_take(arena, (uint64_t)e->n_slots, e->slot_bytes);
}

/* Turns the bit of an expert in the map of its level. */
static void flip(struct experts *e, int32_t expert) {
    const int level = e->uses[expert] == 0 ? 0 : 32 - __builtin_clz(e->uses[expert]);
    e->levels[level * e->n_words + expert / 64] ^= (uint64_t)1 << expert % 64;
}

/* What is in use may not leave. */
static const struct ffn_weights *hold(struct experts *e, int32_t at) {
    const struct place *const p = &e->places[at];
    e->places[p->older].newer = p->newer;
    e->places[p->newer].older = p->older;
    if (!e->lru) flip(e, p->expert);
    return &p->weights;
}

static void let_go(struct experts *e, int32_t at) {
    struct place *const p = &e->places[at], *const end = &e->places[e->n_slots];
    p->older = end->older;
    p->newer = e->n_slots;
    e->places[p->older].newer = end->older = at;
    e->uses[p->expert] += !e->lru && e->uses[p->expert] < (1 << (EXPERT_LEVELS - 1)) - 1;
    if (!e->lru) flip(e, p->expert);
    e->since_halved++;
}

void experts_reset(struct experts *e) {
    atomic_init(&e->fault, 0);
    e->n_missing = e->n_filled = e->since_halved = 0;
    if (e->n_slots == 0) return;
    memset(e->slot_of, -1, (size_t)e->model->n_experts * sizeof *e->slot_of);
    memset(e->uses, 0, (size_t)e->model->n_experts * sizeof *e->uses);
    memset(e->levels, 0, EXPERT_LEVELS * (size_t)e->n_words * sizeof *e->levels);
    e->places[e->n_slots].older = e->places[e->n_slots].newer = e->n_slots;
}

static void halve(struct experts *e) {
    const size_t words = (size_t)e->n_words;
    if (e->lru || e->since_halved < 4 * e->model->n_experts) return;
    e->since_halved = 0;
    for (int32_t i = 0; i < e->model->n_experts; i++) e->uses[i] /= 2;
    for (size_t i = 0; i < words; i++) e->levels[i] |= e->levels[words + i];
    memmove(e->levels + words, e->levels + 2 * words, (EXPERT_LEVELS - 2) * words * sizeof *e->levels);
    memset(e->levels + (EXPERT_LEVELS - 1) * words, 0, words * sizeof *e->levels);
}

/* The expert that leaves for one of a layer whose last expert is `last`. There is one. */
static int32_t victim(const struct experts *e, int32_t last) {
    if (e->lru) return e->places[e->places[e->n_slots].newer].expert;
    for (const uint64_t *level = e->levels;; level += e->n_words) {
        for (int32_t i = 0; i <= e->n_words; i++) { /* backwards, and around to the rest of the first word */
            const int32_t at = (last / 64 - i + e->n_words) % e->n_words;
            const uint64_t word = level[at] & ~(uint64_t)0 >> (i == 0 ? 63 - last % 64 : 0);
            if (word != 0) return 64 * at + 63 - __builtin_clzll(word);
        }
    }
}

/* Finds a place for an expert, that of another if need be, and says how it will lie there. */
static const struct ffn_weights *give_place(struct experts *e, int32_t expert, int32_t last, int32_t *at) {
    *at = e->n_filled;
    if (e->n_filled == e->n_slots) {
        const int32_t leaves = victim(e, last);
        *at = e->slot_of[leaves];
        hold(e, *at);
        e->slot_of[leaves] = -1;
    } else if (++e->n_filled > e->n_written) e->n_written = e->n_filled;
    const struct ffn_weights *const from = &e->model->experts[expert];
    struct place *const p = &e->places[*at];
    uint8_t *const to = e->memory + (uint64_t)*at * e->slot_bytes;
    *p = (struct place){.weights = *from, .expert = expert};
    p->weights.gate.data = to;
    if (from->up.data != NULL) p->weights.up.data = to + (from->up.data - from->gate.data);
    p->weights.down.data = to + (from->down.data - from->gate.data);
    e->slot_of[expert] = *at;
    return &p->weights;
}

static void read_item(void *argument, int32_t item, UNUSED int32_t worker) {
    struct experts *const e = argument;
    const int32_t at = e->missing[item / pieces(e)];
    const struct os_file *const file = &e->model->container.file;
    const struct ffn_weights *const from = &e->model->experts[e->places[at].expert];
    const uint64_t start = (uint64_t)(item % pieces(e)) * e->read_bytes, bytes = ffn_bytes(from);
    if (start >= bytes) return;
    const int32_t fault = os_read(file, (uint64_t)(from->gate.data - file->data) + start, e->memory + (uint64_t)at * e->slot_bytes + start,
                                  bytes - start < e->read_bytes ? bytes - start : e->read_bytes);
    if (fault != 0) atomic_store(&e->fault, fault);
}

struct ffn_group *experts_take(struct experts *e, int32_t layer, struct ffn_group *groups, int32_t *n, int32_t *n_there) {
    *n_there = *n;
    if (e->n_slots == 0) return groups;
    int32_t count = 0, routed = 0;
    while (count < *n && (groups[count].expert < 0 || routed < e->n_slots)) routed += groups[count++].expert >= 0;
    *n = count;
    *n_there = e->n_missing = 0;
    halve(e);
    for (int32_t g = 0; g < count; g++) {
        const int32_t at = groups[g].expert < 0 ? -1 : e->slot_of[groups[g].weights - e->model->experts];
        if (at >= 0) groups[g].weights = hold(e, at);
        if (at >= 0 || groups[g].expert < 0) e->groups[(*n_there)++] = groups[g];
        else e->missing[e->n_missing++] = g;
    }
    colibri_traffic unused = {0}, *const traffic = e->traffic == NULL ? &unused : &e->traffic[layer];
    traffic->hits += (uint64_t)(routed - e->n_missing);
    traffic->misses += (uint64_t)e->n_missing;
    const struct layer *const l = &e->model->layers[layer];
    const int32_t last = e->n_missing == 0 ? 0 : (int32_t)(l->experts - e->model->experts) + l->router.rows - 1;
    for (int32_t i = 0; i < e->n_missing; i++) {
        struct ffn_group *const group = &groups[e->missing[i]];
        traffic->bytes_read += ffn_bytes(group->weights);
        group->weights = give_place(e, (int32_t)(group->weights - e->model->experts), last, &e->missing[i]);
        e->groups[*n_there + i] = *group;
    }
    for (int32_t g = 0; g < count; g++) {
        if (groups[g].expert >= 0) let_go(e, (int32_t)((const struct place *)(const void *)groups[g].weights - e->places));
    }
    if (e->n_missing > 0) threads_begin(&e->lanes, read_item, e, e->n_missing * pieces(e));
    return e->groups;
}

int32_t experts_wait(struct experts *e, int32_t layer, colibri_error *error) {
    if (e->n_missing == 0) return COLIBRI_OK;
    const uint64_t since = os_clock_ns();
    threads_end(&e->lanes);
    if (e->traffic != NULL) e->traffic[layer].wait_ns += os_clock_ns() - since;
    const int32_t fault = atomic_exchange(&e->fault, 0);
    e->n_missing = 0;
    if (fault != 0) experts_reset(e); /* what was read may be half an expert: nothing is held any more */
    FAIL_IF(fault != 0, error, IO, "layer %d: experts cannot be read from the model file: %s; it was cut off or the disk fails", layer,
            strerror(fault));
    return COLIBRI_OK;
}
