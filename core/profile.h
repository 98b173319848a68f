/* profile.h: where the time of evaluations goes: into the caller's arrays, or nowhere at the cost of a test a phase. */
#pragma once

#include "threads.h"

#include "../include/colibri.h"

struct profile {
    const colibri_profile *out;   /* NULL: off; so is the recording */
    colibri_recording *recording;
    struct threads *threads;
    uint64_t last;              /* clock at the end of the previous phase */
};

/* The clock starts. */
void profile_begin(struct profile *profile, const colibri_profile *out, colibri_recording *recording, struct threads *threads);
/* Everything since the last mark was this phase of this layer; layer n_layers: what is outside the layers. */
void profile_mark(struct profile *profile, int32_t layer, enum colibri_phase phase);

/* The clock before one expert's work; 0 where nobody asked. */
static inline uint64_t profile_clock(const struct profile *profile) {
    return profile->out == NULL && profile->recording == NULL ? 0 : os_clock_ns();
}
void profile_expert(const struct profile *profile, int32_t layer, int32_t expert, int32_t visit, uint64_t since);
