/* experts.c: the cache of routed experts. Owns its slots, which expert leaves for another, and the reads; refuses nothing:
 * a cache of one slot works, turn by turn. A turn is the use of some experts of a layer; they stay in their slots meanwhile.
 * LRU: the expert used longest ago leaves. LFRU: a use counts, up to 31; now and then all counts are halved; experts whose
 * counts have as many binary digits are on a level; of the lowest level leaves who was used last: layers come in turn, so
 * that the layers just left are needed last. A ring of places for each level keeps both O(1). */
#include "experts.h"

#include <string.h>

enum { READ_STEP = 1024 * 1024, LANES_MAX = 16 };

static int32_t pieces(const struct experts *e) {
    return (int32_t)((e->slot_bytes + READ_STEP - 1) / READ_STEP);
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
    e->places = arena_take(arena, slots > 0 ? slots + EXPERT_LEVELS : 0, sizeof *e->places);
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

/* Puts a place, or those of the ring `from`, behind those of the ring `to`: as if they had been used later. */
static void join(struct experts *e, int32_t from, int32_t to) {
    struct place *const a = &e->places[from], *const b = &e->places[to];
    const int32_t first = from < e->n_slots ? from : a->newer, last = from < e->n_slots ? from : a->older;
    if (first == from && from >= e->n_slots) return;
    e->places[b->older].newer = first;
    e->places[first].older = b->older;
    e->places[last].newer = to;
    b->older = last;
    if (from >= e->n_slots) a->older = a->newer = from;
}

static void leave_ring(struct experts *e, int32_t at) {
    struct place *const p = &e->places[at];
    e->places[p->older].newer = p->newer;
    e->places[p->newer].older = p->older;
    p->older = p->newer = at;
}

/* The last used of its level. */
static void use(struct experts *e, int32_t at) {
    uint8_t *const uses = &e->uses[e->places[at].expert];
    if (!e->lru && *uses < (1 << (EXPERT_LEVELS - 1)) - 1) ++*uses;
    join(e, at, e->n_slots + (*uses == 0 ? 0 : 32 - __builtin_clz(*uses)));
    e->since_halved++;
}

void experts_reset(struct experts *e) {
    atomic_init(&e->fault, 0);
    e->n_missing = e->n_filled = e->since_halved = 0;
    if (e->n_slots == 0) return;
    memset(e->slot_of, -1, (size_t)e->model->n_experts * sizeof *e->slot_of);
    memset(e->uses, 0, (size_t)e->model->n_experts * sizeof *e->uses);
    for (int32_t i = 0; i < e->n_slots + EXPERT_LEVELS; i++) e->places[i] = (struct place){.expert = -1, .older = i, .newer = i};
}

static void halve(struct experts *e) {
    if (e->lru || e->since_halved < 4 * e->model->n_experts) return;
    e->since_halved = 0;
    for (int32_t i = 0; i < e->model->n_experts; i++) e->uses[i] /= 2;
    for (int32_t i = 1; i < EXPERT_LEVELS; i++) join(e, e->n_slots + i, e->n_slots + i - 1);
}

/* Finds a place for an expert, that of another if need be, and says how it will lie there. */
static const struct ffn_weights *give_place(struct experts *e, int32_t expert, int32_t *at) {
    const struct place *level = &e->places[e->n_slots];
    while (e->n_filled == e->n_slots && level->newer >= e->n_slots) level++;
    *at = e->n_filled < e->n_slots ? e->n_filled++ : e->lru ? level->newer : level->older;
    leave_ring(e, *at);
    const struct ffn_weights *const from = &e->model->experts[expert];
    struct place *const p = &e->places[*at];
    uint8_t *const to = e->memory + (uint64_t)*at * e->slot_bytes;
    if (p->expert >= 0) e->slot_of[p->expert] = -1;
    *p = (struct place){*from, expert, p->older, p->newer};
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
    const uint64_t start = (uint64_t)(item % pieces(e)) * READ_STEP, bytes = ffn_bytes(from);
    if (start >= bytes) return;
    const int32_t fault = os_read(file, (uint64_t)(from->gate.data - file->data) + start, e->memory + (uint64_t)at * e->slot_bytes + start,
                                  bytes - start < READ_STEP ? bytes - start : READ_STEP);
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
        if (at >= 0) {
            leave_ring(e, at);
            groups[g].weights = &e->places[at].weights;
        }
        if (at >= 0 || groups[g].expert < 0) e->groups[(*n_there)++] = groups[g];
        else e->missing[e->n_missing++] = g;
    }
    colibri_traffic unused = {0}, *const traffic = e->traffic == NULL ? &unused : &e->traffic[layer];
    traffic->hits += (uint64_t)(routed - e->n_missing);
    traffic->misses += (uint64_t)e->n_missing;
    for (int32_t i = 0; i < e->n_missing; i++) {
        struct ffn_group *const group = &groups[e->missing[i]];
        traffic->bytes_read += ffn_bytes(group->weights);
        group->weights = give_place(e, (int32_t)(group->weights - e->model->experts), &e->missing[i]);
        e->groups[*n_there + i] = *group;
    }
    for (int32_t g = 0; g < count; g++) {
        if (groups[g].expert >= 0) use(e, (int32_t)((const struct place *)(const void *)groups[g].weights - e->places));
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
    for (int32_t i = 0; fault != 0 && i < e->n_missing; i++) { /* what was read may be half an expert */
        e->slot_of[e->places[e->missing[i]].expert] = -1;
        e->places[e->missing[i]].expert = -1;
    }
    e->n_missing = 0;
    FAIL_IF(fault != 0, error, IO, "layer %d: experts cannot be read from the model file: %s; it was cut off or the disk fails", layer,
            strerror(fault));
    return COLIBRI_OK;
}
