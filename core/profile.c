/* profile.c: adds times to the arrays of a colibri_profile. */
#include "profile.h"

static const char *const names[COLIBRI_PHASES] = {
    [COLIBRI_PHASE_EMBED] = "embed",     [COLIBRI_PHASE_NORM] = "norm",       [COLIBRI_PHASE_QKV] = "qkv",
    [COLIBRI_PHASE_ROPE] = "rope",       [COLIBRI_PHASE_ATTEND] = "attend",   [COLIBRI_PHASE_ATTN_OUT] = "attn_out",
    [COLIBRI_PHASE_ROUTER] = "router",   [COLIBRI_PHASE_GATE_UP] = "gate_up", [COLIBRI_PHASE_DOWN] = "down",
    [COLIBRI_PHASE_OUTPUT] = "output",   [COLIBRI_PHASE_OBSERVER] = "observer", [COLIBRI_PHASE_DELTA] = "delta",
};

const char *colibri_phase_name(int32_t phase) {
    return phase < 0 || phase >= COLIBRI_PHASES ? NULL : names[phase];
}

void profile_begin(struct profile *profile, const colibri_profile *out, colibri_recording *recording, struct threads *threads) {
    *profile = (struct profile){out, recording, threads, 0};
    threads->timed = out != NULL;
    threads->waited = 0;
    if (out != NULL) profile->last = os_clock_ns();
}

void profile_mark(struct profile *profile, int32_t layer, enum colibri_phase phase) {
    if (profile->out == NULL) return;
    const uint64_t now = os_clock_ns();
    const size_t at = (size_t)layer * COLIBRI_PHASES + (size_t)phase;
    profile->out->phase_ns[at] += now - profile->last;
    profile->out->wait_ns[at] += profile->threads->waited;
    profile->threads->waited = 0;
    profile->last = now;
}

void profile_expert(const struct profile *profile, int32_t layer, int32_t expert, int32_t visit, uint64_t since) {
    const colibri_recording *const r = profile->recording;
    if (profile->out == NULL && r == NULL) return;
    const uint64_t ns = os_clock_ns() - since;
    const size_t at = profile->out == NULL ? 0 : (size_t)layer * (size_t)profile->out->n_experts + (size_t)expert;
    if (profile->out != NULL) __atomic_fetch_add(&profile->out->expert_ns[at], ns, __ATOMIC_RELAXED); /* any thread */
    if (r != NULL) __atomic_fetch_add(&r->visit_ns[r->n_visits + visit], (uint32_t)ns, __ATOMIC_RELAXED);
}
