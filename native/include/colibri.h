/*
 * libcolibri: Mixture-of-Experts language models on CPUs.
 *
 * A model is a mapped, read-only file. A context is memory laid out once, at open: KV pages, activations, held logits and a
 * thread pool; after it is open nothing allocates. The engine knows no sessions and no files but the model: it is given
 * token ids, positions and page numbers.
 *
 * Conventions
 *   - Functions return COLIBRI_OK or a negative code. The words are in the caller's `err` buffer at open, and afterwards in
 *     colibri_last_error(ctx), which is valid until the next call on that context.
 *   - A model may be used by many contexts and threads at once. A context may be used by one thread at a time; only
 *     colibri_cancel() may be called from another thread meanwhile, and colibri_kv_save() on pages that no running
 *     forward writes.
 *   - Structs that a caller fills start with `struct_bytes`, set to sizeof the struct; a size this library does not know is
 *     refused with COLIBRI_E_INVALID.
 *   - Pointers marked COLIBRI_RESTRICT must not overlap others of the same call.
 *   - The shared library's soname carries the number of the binary interface, libcolibri.so.0. It is raised when a program built before would
 *     break: a function, field or constant is taken away or means something else. New functions do not raise it, nor does a longer struct, whose
 *     former size stays known. Only the names here are exported.
 *   - Arithmetic: docs/numerics.md. File format: docs/format.md.
 */
#ifndef COLIBRI_H
#define COLIBRI_H

#include <stddef.h>
#include <stdint.h>

#if defined(__cplusplus)
#define COLIBRI_RESTRICT
extern "C" {
#else
#define COLIBRI_RESTRICT restrict
#endif

#if defined(_WIN32)
#define COLIBRI_API
#else
#define COLIBRI_API __attribute__((visibility("default")))
#endif

/* The text between the two markers is also given to cffi: plain declarations only. COLIBRI_API and COLIBRI_RESTRICT are
 * taken out there. */
/* cffi: begin */

#define COLIBRI_PAGE_TOKENS 32
#define COLIBRI_NUMERICS_VERSION 1
#define COLIBRI_MAX_END_TOKENS 16
#define COLIBRI_MAX_TOP_LOGPROBS 20

enum {
    COLIBRI_OK = 0,
    COLIBRI_E_INVALID = -1,     /* an argument is out of its range */
    COLIBRI_E_NOMEM = -2,       /* memory could not be had at open */
    COLIBRI_E_IO = -3,          /* the system refused a file operation */
    COLIBRI_E_FORMAT = -4,      /* the model file contradicts itself or its size */
    COLIBRI_E_UNSUPPORTED = -5, /* a version, family feature or instruction set that this build lacks */
    COLIBRI_E_CANCELED = -6,    /* colibri_cancel() was called */
    COLIBRI_E_NUMERIC = -7,     /* a row is not finite, or K or V does not fit the KV format */
    COLIBRI_E_CHECKSUM = -8,    /* bytes do not match their checksum */
    COLIBRI_E_CAPACITY = -9     /* more tokens, rows or sequences than the context was opened for */
};

enum { COLIBRI_KV_F32 = 1, COLIBRI_KV_F16 = 2 };

/* How weights come into memory. Mapped: when they are first used, shared with other processes, and given up when memory is short. Read: all at
 * open, into memory of the process, for file systems where mapping is bad. The last: all but the experts, which stay mapped, for contexts with
 * expert_ram_bytes. */
enum { COLIBRI_WEIGHTS_MAP = 0, COLIBRI_WEIGHTS_READ = 1, COLIBRI_WEIGHTS_READ_TRUNK = 2 };

/* What a row of a batch is for. Both bits may be set. */
enum { COLIBRI_ROW_NONE = 0, COLIBRI_ROW_LOGITS = 1, COLIBRI_ROW_SCORE = 2 };

typedef struct colibri_model colibri_model_t;
typedef struct colibri_context colibri_context_t;

typedef struct colibri_model_info {
    size_t struct_bytes;
    uint64_t file_bytes; /* without shards */
    uint64_t expert_bytes_total; /* what the expert blocks take in the file, padding included */
    uint64_t json_offset, json_bytes;
    uint8_t fingerprint[32];
    uint32_t format_version;
    uint32_t n_layers, hidden, vocabulary, n_heads, n_kv_heads, head_dim;
    uint32_t n_experts, top_k, expert_width, shared_width;
    uint32_t max_positions;
    uint32_t n_end_tokens;
    int32_t end_tokens[16];
    uint32_t n_shards; /* files beside this one that hold the experts; 1: none, they are in it */
} colibri_model_info_t;

/* Who decides which experts a token goes to: the model's router, or a table that was learned from a text (an approximation, part of the numerics key). */
enum { COLIBRI_ROUTING_EXACT = 0, COLIBRI_ROUTING_STATIC = 1 };

typedef struct colibri_model_options {
    size_t struct_bytes;
    uint32_t weights; /* COLIBRI_WEIGHTS_* */
} colibri_model_options_t;

typedef struct colibri_context_options {
    size_t struct_bytes;
    uint32_t kv_format;       /* COLIBRI_KV_*; 0 means f16 */
    uint32_t n_pages;         /* KV pages in the pool; at least 1 */
    uint32_t max_rows;        /* rows in one forward; 0 means 512 */
    uint32_t max_logits;      /* rows whose logits are held; 0 means 8 */
    uint32_t max_context;     /* positions of one sequence; 0 means as many as the model allows */
    uint32_t prefill_threads; /* for a batch of which any sequence has more than one row; 0 means usable cores */
    uint32_t decode_threads;  /* for the others; 0 means usable cores */
    uint64_t seed;            /* for colibri_infer */
    const char *isa;          /* "scalar", "avx2", "avxvnni", "avx512vnni", "amx"; NULL: $COLIBRI_ISA, else the best that passes its trial */
    /* Since 0.1; a struct that ends before it is taken. */
    uint64_t expert_ram_bytes; /* memory for experts, which are read into it as they are routed to; 0: they are used where the model has them */
    const char *static_table;  /* path of a table of this model (docs/format.md); NULL: none. It foresees what to read into expert_ram_bytes */
    uint32_t routing;          /* COLIBRI_ROUTING_*; static needs the table */
} colibri_context_options_t;

/* What became of expert_ram_bytes. Counted since open. */
typedef struct colibri_expert_stats {
    size_t struct_bytes;
    uint64_t slots, slot_bytes, slots_used; /* each holds an expert; 0 slots: expert_ram_bytes was 0 */
    uint64_t hits, misses;                  /* experts of a layer's step that were in memory when it was routed, or not */
    uint64_t read_ahead, read_ahead_used;   /* experts that were read before they were routed to; those that then were */
    uint64_t bytes_read;
    uint64_t wait_ns; /* that steps waited for experts */
} colibri_expert_stats_t;

/* One step: rows of any number of sequences. The rows of a sequence stand together, at consecutive positions. Row i writes K
 * and V at its position into the sequence's page position / 32, which no other sequence of the batch may own, and attends to
 * all positions up to its own. The positions before a sequence's first row must have been written (forward, load or copy). */
typedef struct colibri_batch {
    size_t struct_bytes;
    size_t n_rows;
    size_t n_sequences;
    const int32_t *tokens;      /* [n_rows] */
    const int32_t *positions;   /* [n_rows] */
    const int32_t *sequences;   /* [n_rows], ascending from 0 */
    const uint8_t *flags;       /* [n_rows], COLIBRI_ROW_* */
    const int32_t *targets;     /* [n_rows], read where COLIBRI_ROW_SCORE is set; may be NULL if nowhere */
    const int32_t *page_starts; /* [n_sequences + 1], indices into pages */
    const int32_t *pages;       /* page numbers of each sequence, from position 0 on */
    int32_t *row_status;        /* [n_rows] out: COLIBRI_OK or COLIBRI_E_NUMERIC */
    float *logprobs;            /* [n_rows] out where scored: log-probability of the target; may be NULL if nowhere */
    int32_t *routing;           /* [n_rows][n_layers][top_k] out: chosen experts, ascending, -1 in dense layers; may be NULL */
} colibri_batch_t;

typedef struct colibri_sampling {
    size_t struct_bytes;
    float temperature;        /* 0: greedy */
    float top_p;              /* 1: off */
    float min_p;              /* 0: off */
    float repetition_penalty; /* 1: off; CTRL (Keskar et al. 2019) */
    float presence_penalty, frequency_penalty; /* 0: off; over the generated tokens only */
    uint32_t top_k;           /* 0: off */
    uint32_t n_top_logprobs;  /* how many of the most likely tokens to report, at most COLIBRI_MAX_TOP_LOGPROBS */
    uint64_t seed;
    uint64_t position;        /* of the token to be drawn */
    const int32_t *history;   /* [n_history] tokens before it, for the penalties; may be NULL */
    size_t n_history;
    size_t n_prompt;          /* how many of the history were not generated */
    const int32_t *bias_ids;  /* [n_bias] */
    const float *bias_values; /* [n_bias] added to the logits */
    size_t n_bias;
    const uint32_t *allowed;  /* bit mask over the vocabulary, [(vocabulary + 31) / 32]; NULL: every token */
} colibri_sampling_t;

typedef struct colibri_sampled {
    int32_t token;
    float logprob; /* of the token, by the model's own distribution: before penalties, bias, mask and temperature */
    int32_t top_ids[20];
    float top_logprobs[20];
} colibri_sampled_t;

/* Version of this library as text, "major.minor.patch". */
COLIBRI_API const char *colibri_version(void);
/* Name of the i-th instruction set that this build has kernels for, the preferred one first; NULL behind the last. */
COLIBRI_API const char *colibri_isa_name(size_t i);

/* Opens a model: reads and checks the header and tables, maps the rest without touching it. On failure *out is NULL and `err`
 * (may be NULL) has a sentence with the path, what is wrong and, for sizes, expected and actual. E_IO, E_FORMAT, E_UNSUPPORTED. */
COLIBRI_API int colibri_model_open(colibri_model_t **out, const char *path, char *err, size_t err_bytes);
/* The same with options; NULL: the defaults. E_INVALID for an option, E_NOMEM where weights that are read find no memory. */
COLIBRI_API int colibri_model_open_with(colibri_model_t **out, const char *path, const colibri_model_options_t *options, char *err, size_t err_bytes);
/* NULL is allowed. Every context of the model must be closed before. */
COLIBRI_API void colibri_model_close(colibri_model_t *model);
/* E_INVALID if struct_bytes is unknown. */
COLIBRI_API int colibri_model_get_info(const colibri_model_t *model, colibri_model_info_t *info);
/* The JSON blob of the file, json_bytes long and not terminated; valid until the model is closed. */
COLIBRI_API const char *colibri_model_json(const colibri_model_t *model);
/* Reads the whole file and compares every checksum. E_CHECKSUM names the first tensor or expert block that differs. */
COLIBRI_API int colibri_model_verify(const colibri_model_t *model, char *err, size_t err_bytes);

/* Lays out all memory and starts the threads. E_INVALID, E_NOMEM, E_UNSUPPORTED (an unknown or failing instruction set); of a static table
 * also E_IO, E_FORMAT and E_CHECKSUM.
 * The model must outlive the context. */
COLIBRI_API int colibri_context_open(colibri_context_t **out, colibri_model_t *model, const colibri_context_options_t *options,
                                     char *err, size_t err_bytes);
/* Joins the threads and frees everything. NULL is allowed. */
COLIBRI_API void colibri_context_close(colibri_context_t *ctx);
/* Name of the instruction set in use. */
COLIBRI_API const char *colibri_context_isa(const colibri_context_t *ctx);
/* Bytes of anonymous memory that the context laid out. */
COLIBRI_API size_t colibri_context_bytes(const colibri_context_t *ctx);
/* K or V values that did not fit the KV format since open. */
COLIBRI_API uint64_t colibri_context_kv_overflows(const colibri_context_t *ctx);
/* Checksum of the static table, by which two can be told apart; 0: there is none. */
COLIBRI_API uint64_t colibri_context_table_checksum(const colibri_context_t *ctx);
/* E_INVALID if struct_bytes is unknown. Any thread. */
COLIBRI_API int colibri_context_expert_stats(colibri_context_t *ctx, colibri_expert_stats_t *stats);
/* The words of the last failed call on this context; "" if it did not fail. */
COLIBRI_API const char *colibri_last_error(const colibri_context_t *ctx);

/* Computes one batch. Everything is checked before anything is written. E_INVALID, E_CAPACITY: nothing changed.
 * E_CANCELED: the pages written so far hold no promise beyond the positions that were valid before. A row that is not finite is
 * told in row_status, and the call still returns COLIBRI_OK. */
COLIBRI_API int colibri_forward(colibri_context_t *ctx, const colibri_batch_t *batch);
/* Logits of the i-th row flagged COLIBRI_ROW_LOGITS in the last forward: [vocabulary]; NULL if there is none. Valid until the next forward. */
COLIBRI_API const float *colibri_logits(const colibri_context_t *ctx, size_t i);
/* Draws a token from held logits, which it leaves as they are. E_INVALID; E_NUMERIC if the logits are not finite or nothing is allowed. */
COLIBRI_API int colibri_sample(colibri_context_t *ctx, size_t i, const colibri_sampling_t *sampling, colibri_sampled_t *out);

/* Bytes of one KV page in this context. */
COLIBRI_API size_t colibri_kv_page_bytes(const colibri_context_t *ctx);
/* Copies page `page` into buf[page_bytes] and gives its checksum. May be called from any thread on a page that nobody writes, and therefore
 * leaves colibri_last_error alone: E_INVALID is a page that is not there, a NULL, or a buf_bytes other than colibri_kv_page_bytes(). */
COLIBRI_API int colibri_kv_save(colibri_context_t *ctx, uint32_t page, void *COLIBRI_RESTRICT buf, size_t buf_bytes, uint64_t *checksum);
/* Copies buf into page `page`, of which the first n_tokens (1..32) positions are valid; the other lanes become zero. E_CHECKSUM: the page is
 * left zero. For colibri_infer, pages 0, 1, 2, … in order become the beginning of the context's own sequence: a page that starts within or right
 * behind it makes the sequence end with the page. */
COLIBRI_API int colibri_kv_load(colibri_context_t *ctx, uint32_t page, uint32_t n_tokens, const void *COLIBRI_RESTRICT buf, size_t buf_bytes,
                                uint64_t checksum);
/* Copies the first n_tokens positions of a page to another, lanes behind them zero: how a tail is forked. */
COLIBRI_API int colibri_kv_copy(colibri_context_t *ctx, uint32_t to_page, uint32_t from_page, uint32_t n_tokens);
/* 64-bit checksum of bytes, as used in files and pages (docs/format.md). Any thread. */
COLIBRI_API uint64_t colibri_checksum(const void *data, size_t n_bytes);

/* Runs one sequence in the context's own pages (0, 1, 2, …), going on behind what is there. Writes each token to output_ids, then
 * raises *n_output_ids atomically. Stops at an end token (which is written), at max_output_len, or on colibri_cancel (E_CANCELED; what was
 * written stays). The last output token is not yet in the pages: give it as the first input of the next call.
 * E_INVALID for empty input or a token out of range, E_CAPACITY if the pages do not suffice for input and output. */
COLIBRI_API int colibri_infer(colibri_context_t *ctx, const int32_t *input_ids, size_t n_input_ids,
                              int32_t *output_ids, size_t *n_output_ids, size_t max_output_len,
                              float temperature);
/* Tokens in the context's own sequence. */
COLIBRI_API size_t colibri_length(const colibri_context_t *ctx);
/* Cuts the context's own sequence to its first n_tokens; 0 empties it. E_INVALID if it is shorter. */
COLIBRI_API int colibri_truncate(colibri_context_t *ctx, size_t n_tokens);
/* Makes a running forward or infer of this context return E_CANCELED at the next layer, or, if none runs, has no effect. Any thread. */
COLIBRI_API void colibri_cancel(colibri_context_t *ctx);

/* cffi: end */

#if defined(__cplusplus)
}
#endif

#endif
