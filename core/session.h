/* session.h: a context: its memory, threads, sequences, and the evaluation of a batch. */
#ifndef COLIBRI_SESSION_H
#define COLIBRI_SESSION_H

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
    bool evaluating;             /* an observer may be running: it must not call back in */
    struct threads threads;
    struct cache cache;
    struct chunk chunk;
    struct sampler sampler;
    int32_t *lengths_before;     /* [max_batch] to undo a failed evaluation */
    bool *in_batch;              /* [max_batch] */
};

int32_t session_plan(const colibri_model *model, const colibri_params *params, colibri_memory_plan *plan,
                     colibri_error *error);
int32_t session_start(colibri_model *model, const colibri_params *params, colibri_context **context, colibri_error *error);
void session_end(colibri_context *context);
/* Fails while an evaluation of this context runs, which only its own observer can ask in. */
int32_t session_check_idle(colibri_context *context);
/* Later evaluations add their times to `profile`; NULL: none. */
int32_t session_measure(colibri_context *context, const colibri_profile *profile);
int32_t session_evaluate(colibri_context *context, const colibri_input *inputs, int32_t n_inputs,
                         const colibri_observer *observer);
/* Makes ids the source of a sequence that holds no positions. */
int32_t session_encode(colibri_context *context, int32_t sequence, const int32_t *ids, int32_t n_ids, const colibri_observer *observer);

#endif
