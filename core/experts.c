/* experts.c: the cache of routed experts. Owns its slots, which expert leaves for another, and the reads; refuses nothing:
 * a cache of one slot works, turn by turn. A turn is the use of some experts of a layer; they stay in their slots meanwhile.
 * LRU: the expert used longest ago leaves. LFRU: a use counts, up to 31; now and then all counts are halved; experts whose
 * counts have as many binary digits are on a level; of the lowest level leaves the one nearest before the end of the layer at
 * hand: layers come in turn, so that the layers just left are needed last. docs/RESIDENCY.md has what that hits. */
#include "experts.h"

#include "topk.h"

#include <string.h>

void experts_layout(struct experts *e, struct arena *arena, const colibri_model *model, const colibri_params *p) {
    const uint64_t slots = (uint64_t)p->expert_slots, all = slots > 0 ? (uint64_t)model->n_experts : 0;
    const uint64_t groups = slots > 0 ? (uint64_t)model->info.n_experts + 1 : 0;
    e->model = model;
    e->n_slots = p->expert_slots;
    e->params = p;
    e->gate = p->gate != NULL ? p->gate : &e->own_gate;
    e->slot_bytes = 0;
    for (int32_t i = 0; i < model->n_experts; i++) {
        const uint64_t bytes = (ffn_bytes(&model->experts[i]) + OS_PAGE - 1) & ~(uint64_t)(OS_PAGE - 1);
        if (bytes > e->slot_bytes) e->slot_bytes = bytes;
    }
    for (e->read_bytes = 1024 * 1024; e->slot_bytes / e->read_bytes >= 1024;) e->read_bytes *= 2;
    e->n_pieces = (int32_t)((e->slot_bytes + e->read_bytes - 1) / e->read_bytes);
    e->n_ahead = slots > 0 && p->prefetch != COLIBRI_PREFETCH_OFF ? AHEAD : 0;
    e->n_words = model->n_experts / 64 + 1;
    e->places = arena_take(arena, slots > 0 ? slots + 1 : 0, sizeof *e->places);
    e->levels = arena_take(arena, slots > 0 ? LEVELS : 0, (uint64_t)e->n_words * sizeof *e->levels);
    e->pieces = arena_take(arena, slots + (uint64_t)e->n_ahead, (uint64_t)e->n_pieces * sizeof *e->pieces);
    e->slot_of = arena_take(arena, all, sizeof *e->slot_of);
    e->uses = arena_take(arena, all, sizeof *e->uses);
    e->groups = arena_take(arena, groups, sizeof *e->groups);
    e->missing = arena_take(arena, groups, sizeof *e->missing);
    threads_layout(&e->lanes, arena, slots > 0 ? p->lanes + 1 : 1);
    threads_layout(&e->scouts, arena, e->n_ahead > 0 ? p->lanes + 1 : 1);
}

void experts_memory(struct experts *e, struct arena *arena) {
    arena->used = (arena->used + OS_PAGE - 1) & ~(uint64_t)(OS_PAGE - 1);
    e->memory = arena_take(arena, (uint64_t)(e->n_ahead + e->n_slots), e->slot_bytes);
}

void experts_reset(struct experts *e) {
    atomic_init(&e->fault, 0);
    atomic_init(&e->late, false);
    e->reads_ahead = false;
    e->n_missing = e->n_asked = e->since_halved = e->n_filled = 0;
    if (e->n_slots == 0) return;
    memset(e->slot_of, -1, (size_t)e->model->n_experts * sizeof *e->slot_of);
    memset(e->uses, 0, (size_t)e->model->n_experts * sizeof *e->uses);
    memset(e->levels, 0, LEVELS * (size_t)e->n_words * sizeof *e->levels);
    memset(e->pieces, -1, (size_t)(e->n_ahead + e->n_slots) * (size_t)e->n_pieces * sizeof *e->pieces);
    for (int32_t i = 0; i < e->n_slots; i++) e->places[i] = (struct place){.expert = -1, .buffer = e->n_ahead + i};
    e->places[e->n_slots].older = e->places[e->n_slots].newer = e->n_slots;
    for (int32_t i = 0; i < e->n_ahead; i++) e->spare[i] = i;
}

/* Turns the bit of an expert in the map of its level. */
static void flip(struct experts *e, int32_t expert) {
    const int level = e->uses[expert] == 0 ? 0 : 32 - __builtin_clz(e->uses[expert]);
    e->levels[level * e->n_words + expert / 64] ^= (uint64_t)1 << expert % 64;
}

/* In use, an expert is neither in the ring nor in a map: it may not leave. */
static struct place *hold(struct experts *e, int32_t at) {
    struct place *const p = &e->places[at];
    e->places[p->older].newer = p->newer;
    e->places[p->newer].older = p->older;
    flip(e, p->expert);
    return p;
}

static void let_go(struct experts *e, int32_t at) {
    struct place *const p = &e->places[at], *const end = &e->places[e->n_slots];
    p->older = end->older;
    p->newer = e->n_slots;
    e->places[p->older].newer = end->older = at;
    e->uses[p->expert] += e->uses[p->expert] < MOST_USES;
    flip(e, p->expert);
    e->since_halved++;
}

static void halve(struct experts *e) {
    if (e->since_halved < 4 * e->model->n_experts) return;
    e->since_halved = 0;
    memset(e->levels, 0, LEVELS * (size_t)e->n_words * sizeof *e->levels);
    for (int32_t i = 0; i < e->model->n_experts; i++) {
        e->uses[i] /= 2;
        if (e->slot_of[i] >= 0) flip(e, i);
    }
}

/* Whose slot one of a layer takes whose last expert is `last`. There is one. */
static int32_t victim(const struct experts *e, int32_t last) {
    if (e->params->expert_policy == COLIBRI_LRU) return e->places[e->n_slots].newer;
    for (const uint64_t *level = e->levels;; level += e->n_words) {
        for (int32_t i = 0; i <= e->n_words; i++) { /* backwards, and around to the rest of the first word */
            const int32_t at = (last / 64 - i + e->n_words) % e->n_words;
            const uint64_t word = level[at] & ~(uint64_t)0 >> (i == 0 ? 63 - last % 64 : 0);
            if (word != 0) return e->slot_of[64 * at + 63 - __builtin_clzll(word)];
        }
    }
}

/* Gives a slot to an expert, and says how it will lie there. What has been read of it ahead goes there. */
static struct place *give_place(struct experts *e, int32_t expert, int32_t last, uint64_t *asked_used) {
    const int32_t at = e->n_filled < e->n_slots ? e->n_filled++ : victim(e, last);
    struct place *const p = &e->places[at];
    if (p->expert >= 0) e->slot_of[hold(e, at)->expert] = -1;
    if (at >= e->n_written) e->n_written = at + 1;
    for (int32_t i = 0; i < e->n_asked; i++) {
        if (e->asked[i].expert != expert || e->asked[i].buffer != e->spare[i]) continue;
        e->spare[i] = p->buffer;
        p->buffer = e->asked[i].buffer;
        ++*asked_used;
    }
    const struct ffn_weights *const from = &e->model->experts[expert];
    uint8_t *const to = e->memory + (uint64_t)p->buffer * e->slot_bytes;
    *p = (struct place){.weights = *from, .expert = expert, .buffer = p->buffer};
    p->weights.gate.data = to;
    if (from->up.data != NULL) p->weights.up.data = to + (from->up.data - from->gate.data);
    p->weights.down.data = to + (from->down.data - from->gate.data);
    e->slot_of[expert] = at;
    return p;
}

/* Reads a piece of an expert into a buffer, unless somebody has, or is about to. */
static void read_piece(struct experts *e, int32_t expert, int32_t buffer, int32_t piece) {
    const struct os_file *const file = &e->model->container.file;
    const struct ffn_weights *const from = &e->model->experts[expert];
    const uint64_t start = (uint64_t)piece * e->read_bytes, bytes = ffn_bytes(from), left = bytes - start;
    if (start >= bytes || atomic_exchange(&e->pieces[buffer * e->n_pieces + piece], expert) == expert) return;
    const int32_t fault = os_read(file, (uint64_t)(from->gate.data - file->data) + start, e->memory + (uint64_t)buffer * e->slot_bytes + start,
                                  left < e->read_bytes ? left : e->read_bytes);
    if (fault != 0) atomic_store(&e->fault, fault);
}

static void read_item(void *argument, int32_t item, UNUSED int32_t worker) {
    struct experts *const e = argument;
    const struct place *const p = &e->places[e->missing[item / e->n_pieces]];
    read_piece(e, p->expert, p->buffer, item % e->n_pieces);
}

static void ahead_item(void *argument, int32_t item, UNUSED int32_t worker) {
    struct experts *const e = argument;
    const struct asked *const asked = &e->asked[item / e->n_pieces];
    if (!atomic_load(&e->late)) read_piece(e, asked->expert, asked->buffer, item % e->n_pieces);
}

void experts_ahead(struct experts *e, int32_t layer, const int32_t *chosen, int32_t n) {
    const int32_t first = (int32_t)(e->model->layers[layer].experts - e->model->experts);
    e->n_asked = 0;
    for (int32_t i = 0; i < n && e->n_asked < e->n_ahead; i++) {
        const int32_t expert = first + chosen[i], at = e->n_asked;
        if (e->slot_of[expert] >= 0 || (at > 0 && e->asked[at - 1].expert == expert)) continue;
        e->asked[e->n_asked++] = (struct asked){expert, e->spare[at]};
    }
    if (e->n_asked == 0) return;
    if (e->params->traffic != NULL) e->params->traffic[layer].asked += (uint64_t)e->n_asked;
    e->reads_ahead = true;
    threads_begin(&e->scouts, ahead_item, e, e->n_asked * e->n_pieces);
}

void experts_settle(struct experts *e) {
    atomic_store(&e->late, e->reads_ahead);
    experts_wait(e, 0, NULL);
}

void experts_begin(struct experts *e, int32_t n_rows) {
    e->decodes = e->n_slots > 0 && n_rows <= AHEAD_ROWS;
    e->tries = e->decodes && e->params->prefetch == COLIBRI_PREFETCH_AUTO && e->n_decoded < TRIAL;
    const bool on = e->tries ? (e->n_decoded ^ e->n_decoded >> 1) & 1 : e->gate->state == COLIBRI_PREFETCH_ON; /* off, on, on, off … */
    e->asks = e->decodes && on;
    e->since = os_clock_ns();
}

void experts_end(struct experts *e) {
    const uint64_t ns = os_clock_ns() - e->since;
    colibri_gate *const gate = e->gate;
    if (!e->decodes) return;
    gate->evaluations[e->asks]++;
    gate->ns[e->asks] += ns;
    if (e->tries) e->times[e->asks][e->n_decoded / 2] = -(float)ns;
    e->n_decoded = (e->n_decoded + 1) % TRIAL_EVERY;
    if (!e->tries || e->n_decoded != TRIAL) return;
    for (int way = 0; way < 2; way++) {
        int32_t quickest[TRIAL / 4];
        topk_select(e->times[way], TRIAL / 2, TRIAL / 4, quickest);
        gate->median_ns[way] = (uint64_t)-e->times[way][quickest[TRIAL / 4 - 1]];
    }
    gate->state = gate->median_ns[1] < gate->median_ns[0] - gate->median_ns[0] / 64 ? COLIBRI_PREFETCH_ON : COLIBRI_PREFETCH_OFF;
    gate->trials++;
}

struct ffn_group *experts_take(struct experts *e, int32_t layer, struct ffn_group *groups, int32_t *n, int32_t *n_there) {
    *n_there = *n;
    if (e->n_slots == 0) return groups;
    int32_t count = 0, routed = 0;
    while (count < *n && (groups[count].expert < 0 || routed < e->n_slots)) routed += groups[count++].expert >= 0;
    *n = count;
    *n_there = e->n_missing = 0;
    if (routed > 0) atomic_store(&e->late, e->reads_ahead);
    halve(e);
    for (int32_t g = 0; g < count; g++) {
        const int32_t at = groups[g].expert < 0 ? -1 : e->slot_of[groups[g].weights - e->model->experts];
        if (at >= 0) groups[g].weights = &hold(e, at)->weights;
        if (at >= 0 || groups[g].expert < 0) e->groups[(*n_there)++] = groups[g];
        else e->missing[e->n_missing++] = g;
    }
    colibri_traffic unused = {0}, *const traffic = e->params->traffic == NULL ? &unused : &e->params->traffic[layer];
    traffic->hits += (uint64_t)(routed - e->n_missing);
    traffic->misses += (uint64_t)e->n_missing;
    const struct layer *const l = &e->model->layers[layer];
    const int32_t last = e->n_missing == 0 ? 0 : (int32_t)(l->experts - e->model->experts) + l->router.rows - 1;
    for (int32_t i = 0; i < e->n_missing; i++) {
        struct ffn_group *const group = &groups[e->missing[i]];
        traffic->bytes_read += ffn_bytes(group->weights);
        struct place *const p = give_place(e, (int32_t)(group->weights - e->model->experts), last, &traffic->asked_used);
        group->weights = &p->weights;
        group->read = true;
        e->missing[i] = (int32_t)(p - e->places);
        e->groups[*n_there + i] = *group;
    }
    for (int32_t g = 0; g < count; g++) {
        if (groups[g].expert >= 0) let_go(e, (int32_t)((const struct place *)(const void *)groups[g].weights - e->places));
    }
    if (e->n_missing > 0) threads_begin(&e->lanes, read_item, e, e->n_missing * e->n_pieces);
    return e->groups;
}

int32_t experts_wait(struct experts *e, int32_t layer, colibri_error *error) {
    const bool late = atomic_load(&e->late);
    if (e->n_missing == 0 && !late) return COLIBRI_OK;
    const uint64_t since = os_clock_ns();
    if (e->n_missing > 0) threads_end(&e->lanes);
    if (late) threads_end(&e->scouts);
    if (late) e->reads_ahead = false;
    atomic_store(&e->late, false);
    if (e->params->traffic != NULL) e->params->traffic[layer].wait_ns += os_clock_ns() - since;
    const int32_t fault = atomic_exchange(&e->fault, 0);
    e->n_missing = 0;
    if (fault != 0) experts_reset(e); /* what was read may be half an expert: nothing is held any more */
    FAIL_IF(fault != 0, error, IO, "layer %d: experts cannot be read from the model file: %s; it was cut off or the disk fails", layer,
            strerror(fault));
    return COLIBRI_OK;
}
