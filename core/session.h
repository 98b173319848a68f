/* session.h: a context: its memory, threads and sequences. */
#pragma once

#include "forward.h"
#include "sample.h"

struct colibri_context {
    colibri_model *model;
    colibri_params params;
    colibri_error error;         /* of the last failure */
    _Atomic bool cancelled;
    uint64_t bytes;              /* of the reservation, this struct included */
    bool owns_memory;
    const colibri_profile *profile; /* NULL: nobody measures */
    colibri_recording *recording; /* NULL: nobody records */
    bool evaluating;             /* an observer may be running: it must not call back in */
    struct threads threads;
    struct cache cache;
    struct experts experts;
    struct chunk chunk;
    struct sampler sampler;
    int32_t *lengths_before;     /* [max_batch] to undo a failed evaluation */
    bool *in_batch;              /* [max_batch] */
};
