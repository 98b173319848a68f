/* forward.h: the layer loop over one chunk of rows. */
#pragma once

#include "chunk.h"

/* Who watches and who may stop the evaluation. */
struct watch {
    const colibri_observer *observer; /* NULL: nobody */
    _Atomic bool *cancelled;
    uint64_t done, total;             /* rows x layers */
};

/* Evaluates the chunk's rows, whose cache positions are reserved, and writes the logits that are wanted; or, where they are
 * one whole source, what later layers attend to, into the cache. */
int32_t forward(struct chunk *chunk, bool source, struct watch *watch, colibri_error *error);
