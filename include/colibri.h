/* colibri.h: the whole public interface of libcolibri, a Mixture-of-Experts inference engine.
 *
 * Owns: opening a `.colibri` model, planning memory, contexts with their sequences, evaluation, sampling.
 * Refuses: other file formats (the Python converter makes `.colibri`), tokenization, printing, exiting.
 *
 * Conventions
 *   - A function that can fail returns 0 (COLIBRI_OK) or a negative status and fills the caller's
 *     `colibri_error` (may be NULL), or the context's own where it takes a context (colibri_last_error), with: what was
 *     expected, what was found, where, what to do next.
 *   - A model is immutable and shared by any number of contexts. A context belongs to one thread at a time;
 *     only colibri_cancel may be called from another thread meanwhile.
 *   - colibri_init makes one reservation of exactly the planned bytes. Nothing later allocates memory, but colibri_fetch with
 *     COLIBRI_RESIDENT, which replaces the mapped file by a private copy.
 *   - Logits are the same bits on every instruction set, for any number of threads, any batch composition and
 *     any chunking of a prompt.
 *   - All counts are int32_t unless they are bytes (uint64_t). Arrays are row-major.
 *
 * The environment variable COLIBRI_ISA = scalar | avx2 | avx2-vnni | avx512 | neon | neon-dotprod forces a kernel set; an
 * unknown or unavailable one is an error of colibri_open.
 */
#ifndef COLIBRI_H
#define COLIBRI_H

#include <stdint.h>

#define COLIBRI_VERSION "0.2.0"

#ifdef __cplusplus
extern "C" {
#endif
#if defined(__GNUC__)
#pragma GCC visibility push(default)
#endif

/* [declarations] Everything up to the end mark is read by the Python binding: plain declarations only. */

enum colibri_status {
    COLIBRI_OK = 0,
    COLIBRI_ERROR_ARGUMENT = -1,    /* a parameter is out of its range */
    COLIBRI_ERROR_IO = -2,          /* the operating system refused a file or a thread */
    COLIBRI_ERROR_FORMAT = -3,      /* the model file is damaged, truncated or not a .colibri file */
    COLIBRI_ERROR_UNSUPPORTED = -4, /* the file or the machine needs something this build lacks */
    COLIBRI_ERROR_MEMORY = -5,      /* the planned bytes could not be had */
    COLIBRI_ERROR_CONTEXT = -6,     /* the sequence would grow beyond `context` positions */
    COLIBRI_ERROR_CANCELLED = -7,   /* colibri_cancel was called or an observer returned non-zero */
    COLIBRI_ERROR_NUMERIC = -8      /* a logit is NaN or infinite: damaged weights or overflow */
};

typedef struct colibri_model colibri_model;
typedef struct colibri_context colibri_context;

typedef struct colibri_error {
    int32_t status;
    char text[508]; /* NUL-terminated UTF-8 */
} colibri_error;

/* Where weights are. Never changes a result. */
enum colibri_residency {
    COLIBRI_MAPPED = 0,   /* in the page cache, mapped on use */
    COLIBRI_RESIDENT = 1, /* a private copy in huge pages, which the system cannot drop: read faster; wiped when the model
                           * is closed */
    COLIBRI_STREAMED = 2  /* the same of all but routed experts: those are read into slots of each context (expert_slots) */
};

/* Who leaves when an expert needs a slot. Never changes a result. */
enum colibri_expert_policy {
    COLIBRI_LFRU = 0, /* of the experts that were used least often lately, the one used longest ago */
    COLIBRI_LRU = 1   /* the one used longest ago */
};

/* How keys and values are held: as they are, or rounded to the nearest half, ties to even, in half the memory. */
enum colibri_kv_type {
    COLIBRI_KV_F32 = 0,
    COLIBRI_KV_F16 = 1
};

/* Whether experts that the next layer is expected to choose are read while this one is computed. Never changes a result. */
enum colibri_prefetch {
    COLIBRI_PREFETCH_AUTO = 0, /* as colibri_gate finds */
    COLIBRI_PREFETCH_ON = 1,
    COLIBRI_PREFETCH_OFF = 2
};

/* What experts in slots cost in one layer. A use is of one expert by the rows of one chunk. */
typedef struct colibri_traffic {
    uint64_t hits, misses; /* uses of experts that were in a slot, and that had to be read */
    uint64_t bytes_read;   /* of those, ahead or when they were needed */
    uint64_t wait_ns;      /* of the evaluating thread for reads */
    uint64_t asked, asked_used; /* experts that were asked for ahead, and those of them that came to use */
} colibri_traffic;

/* Measures prefetch on and off: of 1,024 evaluations of a few rows (decoding) the first 64 take turns, and what had the lower
 * median is kept for the others; off, unless on is quicker by 1/64. Index 0: off, 1: on. */
typedef struct colibri_gate {
    int32_t state;         /* enum colibri_prefetch: what is kept now; AUTO: undecided */
    int32_t trials;        /* that were decided */
    uint64_t evaluations[2], ns[2]; /* of a few rows, and how long they took, in trials or not */
    uint64_t median_ns[2]; /* in the last trial */
} colibri_gate;

/* What colibri_open found. Sizes in elements; pointers live as long as the model. */
typedef struct colibri_model_info {
    int32_t n_vocab;        /* rows of the embedding: the length of a logits row */
    int32_t n_vocab_used;   /* ids at or above it are padding and are never sampled */
    int32_t n_layers;
    int32_t n_embd;
    int32_t n_experts;      /* the largest of all layers; 0 for an all-dense model */
    int32_t n_experts_used; /* experts chosen per token */
    int32_t context_length; /* positions the model was trained for */
    uint64_t file_bytes;
    uint64_t model_bytes;   /* private memory that the open model takes */
    const char *isa;        /* the kernel set in use */
    const uint8_t *config;  /* config section of the file (docs/FORMAT.md, section 2), checked: whatever else shapes the model */
    uint64_t config_bytes;
} colibri_model_info;

/* Parameters of a context. Fill with colibri_default_params, then change fields. */
typedef struct colibri_params {
    int32_t context;      /* positions per sequence, at least 1; default min(context_length, 4096) */
    int32_t max_batch;    /* sequences, 1 to 4096; default 1; with an encoder each has a source of up to `context` positions too */
    int32_t threads;      /* 1 to 256; default: physical cores of the affinity mask, cut to the cgroup's quota */
    int32_t chunk;        /* rows evaluated together, 1 to 4096; default 1024; never more than context x max_batch is reserved */
    int32_t pin;          /* 1: every thread but the caller's stays on a physical core of its own, the second of the affinity
                           * mask and those behind it; refused if threads are more than cores; default 0 */
    void *memory;         /* caller's memory for the context, 4096-byte aligned, or NULL: reserve it */
    uint64_t memory_bytes;/* size of `memory`: at least plan.context_bytes */
    uint64_t memory_limit;/* most bytes that the process may hold with this context; 0: no limit but the machine's. If all does
                           * not fit, as many experts get slots as do; refused if not even one does */
    int32_t expert_slots; /* experts that the context holds in slots, read when they are needed; 0: decided by memory_limit */
    int32_t expert_policy;/* enum colibri_expert_policy */
    int32_t lanes;        /* reads at the same time, 1 to 16; default 4 */
    int32_t kv_type;      /* enum colibri_kv_type; refused but F32 where no layer has keys and values */
    int32_t prefetch;     /* enum colibri_prefetch; but OFF it takes memory for two more experts than there are slots */
    colibri_traffic *traffic; /* [n_layers] the caller's, to which evaluations add (zero it first); NULL: nobody counts */
    colibri_gate *gate;   /* the caller's, which evaluations keep up to date (zero it first); NULL: nobody asks */
} colibri_params;

/* Bytes by category, known before anything is taken. */
typedef struct colibri_memory_plan {
    uint64_t process;         /* that it holds already, private weights and `model` not counted */
    uint64_t weights_mapped;  /* the model file, or with slots what is no expert of it, mapped read-only: the system may drop it */
    uint64_t weights_resident;/* what colibri_fetch has copied of it into private memory */
    uint64_t model;           /* private memory of the open model, shared by its contexts */
    uint64_t expert_cache;    /* expert_slots times the largest expert */
    uint64_t kv_cache;        /* ids, keys and values; of layers with a recurrent state three of them for each sequence */
    uint64_t activations;
    uint64_t sampling;
    uint64_t threads;         /* stacks */
    uint64_t control;         /* the context itself, block tables, alignment */
    uint64_t context_bytes;   /* expert_cache + kv_cache + activations + sampling + threads + control: one reservation */
    uint64_t total_bytes;     /* process + weights_mapped + weights_resident + model + context_bytes */
    uint64_t slot_bytes;      /* of the largest expert; 0: no experts. The least memory_limit is total_bytes with one slot */
    int32_t expert_slots;     /* 0: experts are read where the file is mapped or copied */
} colibri_memory_plan;

/* What the router of one layer decided for the rows of one chunk; valid during the call only. */
typedef struct colibri_routing {
    int32_t layer;
    int32_t n_rows;
    int32_t n_experts;
    int32_t n_experts_used;
    const int32_t *sequences; /* [n_rows] */
    const int32_t *positions; /* [n_rows] */
    const float *logits;      /* [n_rows][n_experts] gate logits */
    const int32_t *experts;   /* [n_rows][n_experts_used] best first; ties: lowest index first */
    const float *weights;     /* [n_rows][n_experts_used] what the experts' outputs are multiplied by */
} colibri_routing;

/* What one routed expert said of the rows of a chunk that chose it; valid during the call only. What it adds to a row is its
 * weight times its output; where a model weights what an expert reads (router_on_input), outputs are such that this holds. */
typedef struct colibri_expert {
    int32_t layer;
    int32_t expert;
    int32_t n_rows;           /* that chose it, at least 1 */
    int32_t n_embd;
    const int32_t *rows;      /* [n_rows] of the chunk, ascending: row r is sequences[r], positions[r] */
    const int32_t *sequences; /* [rows of the chunk] */
    const int32_t *positions; /* [rows of the chunk] */
    const float *weights;     /* [n_rows] as in colibri_routing; 0: beyond what the expert takes, the output counts for nothing */
    const float *outputs;     /* [n_rows][n_embd] those of colibri_observer */
} colibri_expert;

/* Called on the evaluating thread between layers, and within them after each expert. A non-zero return cancels the
 * evaluation. Any may be NULL, and costs nothing then; results are the same bits with and without. An observer may call
 * colibri_cancel on its context and nothing else. */
typedef struct colibri_observer {
    int32_t (*progress)(void *user, uint64_t done, uint64_t total); /* in rows x layers */
    int32_t (*routing)(void *user, const colibri_routing *routing); /* once per MoE layer and chunk */
    void *user;
    int32_t (*expert)(void *user, const colibri_expert *expert); /* once per MoE layer, chunk and routed expert that a row chose,
                                                                  * by ascending expert */
    float *outputs;       /* [chunk of colibri_params][n_embd] the caller's, filled for `expert`; must be there with it */
} colibri_observer;

/* Parts of an evaluation, in the order of the work; names by colibri_phase_name. */
enum colibri_phase {
    COLIBRI_PHASE_EMBED,    /* look-up, and the rotary angles */
    COLIBRI_PHASE_NORM,     /* both norms of a layer, with the quantisation that follows them */
    COLIBRI_PHASE_QKV,      /* projections */
    COLIBRI_PHASE_ROPE,     /* biases, head norms, rotation, writing the cache */
    COLIBRI_PHASE_ATTEND,
    COLIBRI_PHASE_DELTA,    /* in layers with a state: convolution, gated delta rule, norm and gate of its output */
    COLIBRI_PHASE_ATTN_OUT, /* projection and residual */
    COLIBRI_PHASE_ROUTER,   /* gate logits, choice, grouping of rows by expert */
    COLIBRI_PHASE_GATE_UP,  /* of all experts or the dense feed-forward, with the activation */
    COLIBRI_PHASE_DOWN,     /* with the weighted sum and the residual */
    COLIBRI_PHASE_OUTPUT,   /* last norm, output head, check of the logits */
    COLIBRI_PHASE_OBSERVER, /* the caller's callbacks */
    COLIBRI_PHASES
};

/* Where time went: evaluations add to the caller's arrays (zero them first). Layer n_layers holds what belongs to none. */
typedef struct colibri_profile {
    int32_t n_layers;       /* of the model */
    int32_t n_experts;      /* of the model: colibri_model_info */
    uint64_t *phase_ns;     /* [n_layers + 1][COLIBRI_PHASES] wall-clock nanoseconds */
    uint64_t *wait_ns;      /* the same: of these, what the calling thread waited for the others */
    uint64_t *expert_ns;    /* [n_layers][n_experts] nanoseconds of work, all threads together; NULL if n_experts is 0 */
} colibri_profile;

/* What routers chose and what that cost (docs/TRACE.md), in arrays of the caller, to which evaluations append: set the counts
 * back to make room. "Choices" are rows times layers with experts. An evaluation that fails leaves the counts as they were. */
typedef struct colibri_recording {
    int32_t max_rows;      /* an evaluation that may need more than are left is refused */
    int32_t n_chunks, n_rows;
    int64_t n_choices, n_visits;
    int32_t *chunks;       /* [max_rows][2] rows evaluated together, and 1 where they are a source, else 0 */
    int32_t *ids, *positions, *sequences; /* [max_rows] */
    int32_t *experts;      /* [choices][n_experts_used] by chunk, then by layer, then by row; best first */
    float *weights;        /* [choices][n_experts_used] what the experts' outputs are multiplied by */
    float *logits;         /* [choices][n_experts] gate logits, NaN behind a layer's last expert; NULL: not wanted */
    uint32_t *visit_ns;    /* [choices x n_experts_used] a visit is an expert that rows of a chunk chose in a layer, by ascending
                            * expert: nanoseconds of work, all threads together */
    uint8_t *visit_read;   /* [choices x n_experts_used] 1: the expert had to be read from the file, 0: it was in memory */
} colibri_recording;

/* Ids to append to one sequence, and where its logits go. */
typedef struct colibri_input {
    int32_t sequence;   /* 0 to max_batch - 1, each at most once in a batch */
    int32_t n_ids;      /* at least 1 */
    const int32_t *ids; /* [n_ids], each 0 to n_vocab - 1 */
    int32_t n_logits;   /* logits of the last n_logits ids, 0 to n_ids */
    float *logits;      /* [n_logits][n_vocab]; may be NULL if n_logits is 0 */
} colibri_input;

/* Applied in this order: repetition_penalty, temperature, top_k, top_p, min_p. All zero is greedy. */
typedef struct colibri_sampling {
    float temperature;        /* 0: greedy (the lowest id among equal logits); else > 0 */
    int32_t top_k;            /* 0: off */
    float top_p;              /* 0 < top_p <= 1; 1: off (0 is read as 1) */
    float min_p;              /* 0 to 1, relative to the most likely token; 0: off */
    float repetition_penalty; /* > 0; 1: off (0 is read as 1). CTRL, arXiv:1909.05858 */
    uint64_t seed;            /* the draw depends on seed and position only */
} colibri_sampling;

/* Version of the library ("0.2.0") and a short name of a status: static strings. */
const char *colibri_version(void);
const char *colibri_status_text(int32_t status);

/* Maps the file, checks every size, type and shape against the config, and binds the tensors. */
int32_t colibri_open(const char *path, colibri_model **model, colibri_error *error);
const colibri_model_info *colibri_info(const colibri_model *model);
/* Brings the whole file into memory, front to back: into the page cache and the page table (COLIBRI_MAPPED), or into
 * private memory (COLIBRI_RESIDENT). Any thread may call it, also while contexts evaluate; once at a time. progress (may
 * be NULL) is called every 32 MiB with bytes; a non-zero return ends the work, and what is done stays; it may close the
 * model. Refused if the file is larger than the memory available. */
int32_t colibri_fetch(colibri_model *model, int32_t residency, int32_t (*progress)(void *user, uint64_t done, uint64_t total),
                      void *user, colibri_error *error);
/* Drops the caller's reference; the file is unmapped when the last context is freed too. NULL is ignored. */
void colibri_close(colibri_model *model);

int32_t colibri_default_params(const colibri_model *model, colibri_params *params);
int32_t colibri_plan(const colibri_model *model, const colibri_params *params, colibri_memory_plan *plan,
                     colibri_error *error);
/* params NULL: the defaults. The context keeps the model open. */
int32_t colibri_init(colibri_model *model, const colibri_params *params, colibri_context **context,
                     colibri_error *error);
/* Wipes every byte that the context wrote, ends its threads, gives the memory back. NULL is ignored. */
void colibri_free(colibri_context *context);
/* Text of the last failure of this context; status 0 if there was none. */
const colibri_error *colibri_last_error(const colibri_context *context);

/* Appends ids to sequence 0 and writes the logits [n_vocab] of the last one. */
int32_t colibri_run_inference(colibri_context *context, const int32_t *input_ids, int32_t n_ids, float *logits);
/* Appends ids to several sequences at once. After a failure every sequence is as it was before. A model with an encoder
 * needs a source first (colibri_encode). */
int32_t colibri_evaluate(colibri_context *context, const colibri_input *inputs, int32_t n_inputs,
                         const colibri_observer *observer);
/* For a model with an encoder (config field n_encoder_layers): reads a source, at most `chunk` and `context` ids, that later
 * evaluations of the sequence attend to. The sequence must hold no positions. It keeps the source through rewinds, hands it
 * on to forks, and has none after a failure. Observers see the source's rows under the same sequence, in the first layers. */
int32_t colibri_encode(colibri_context *context, int32_t sequence, const int32_t *ids, int32_t n_ids,
                       const colibri_observer *observer);
/* Measures every later evaluation of this context into the profile, which must outlive it; NULL ends that. A call that
 * fails leaves the profile before it in use. Costs about a microsecond a layer. */
int32_t colibri_measure(colibri_context *context, const colibri_profile *profile);
/* Records every later evaluation of this context, under the rules of colibri_measure. Changes no result. */
int32_t colibri_record(colibri_context *context, colibri_recording *recording);
/* "embed", "qkv" …; NULL beyond the last. A static string. */
const char *colibri_phase_name(int32_t phase);
/* Ends the running evaluation between two layers (or the next one, if none runs). Any thread may call it. */
void colibri_cancel(colibri_context *context);

/* Positions held by a sequence, or COLIBRI_ERROR_ARGUMENT (without a text). */
int32_t colibri_position(const colibri_context *context, int32_t sequence);
/* Forgets everything at and after `position`; 0 empties the sequence. Where layers have a recurrent state, the next evaluation
 * begins at the last position in front of it that has one, and evaluates the ids from there on once more, with the same results
 * (its observer is told of them again): sequences keep two states, of the last multiple of 128 positions among ids that came
 * several at once in each of the last two evaluations that had one. An evaluation that fails leaves the same work behind. */
int32_t colibri_rewind(colibri_context *context, int32_t sequence, int32_t position);
/* Makes `target` a copy of `source`, with what `source` was made from; whole cache blocks are shared, never copied; recurrent
 * states are copied. */
int32_t colibri_fork(colibri_context *context, int32_t source, int32_t target);

/* Chooses the next id from logits [n_vocab], which stay unchanged; -INFINITY masks an id. history [n_history] feeds the penalty
 * (NULL if 0); position makes draws independent: use the number of tokens before the drawn one. */
int32_t colibri_sample(colibri_context *context, const float *logits, const colibri_sampling *sampling,
                       const int32_t *history, int32_t n_history, uint64_t position, int32_t *id);
/* The k largest of values [n], best first, ties to the lowest index; allocates nothing. NaN counts as lowest. */
int32_t colibri_topk_select(const float *values, int32_t n, int32_t k, int32_t *indices);

/* Finds what q4 (type 5) and q6 (type 6) keep of n super-groups of 256 weights (docs/FORMAT.md, section 4): weights [256][n] and
 * what their squared errors cost, costs [256][n]; all finite, magnitudes within the type. n: a multiple of 4.
 * q4: units [2][n] d and dmin (numbers of f16), steps [16][n] sc and m of 8 groups, quants [256][n] from 0 to 15.
 * q6: units [2][n] d and 0, steps [16][n] sc from 0 to 127, quants [256][n] + 32; the lowest weight of each 16 must be that of
 * largest magnitude: give those of the others negated, and negate their steps. Allocates nothing, may be called from
 * many threads, and gives the same on every machine. COLIBRI_ERROR_ARGUMENT: a wrong type or n, or NULL. */
int32_t colibri_quantize(int32_t type, int32_t n, const float *weights, const float *costs, float *units, uint8_t *steps,
                         uint8_t *quants);

/* [end of declarations] */

#if defined(__GNUC__)
#pragma GCC visibility pop
#endif
#ifdef __cplusplus
}
#endif
#endif
