/*
 * Experts in a fixed amount of memory: slots of one expert each, filled from the file when they are routed to, or before.
 *
 * The thread that owns the context says what it needs and waits; a few threads of the store read. Everything here is under one mutex, which
 * nobody holds while reading or computing. Whatever is kept, dropped or read ahead decides when a result comes, never what it is.
 */
#ifndef COLIBRI_EXPERT_STORE_H
#define COLIBRI_EXPERT_STORE_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "colibri.h"
#include "error.h"
#include "model.h"

/* Reads under way at once: with fewer, fast disks have nothing to do between two of them. */
#define COLIBRI_READERS 4

/* Who foresees which experts the next layer will need. Any number of them may name one. */
enum { FORESEEN_BY_ROUTER = 1, FORESEEN_BY_LAST_STEP = 2, FORESEEN_BY_BATCH = 4, FORESEEN_BY_TABLE = 8, N_SEERS = 4 };

/* An expert of a layer. */
struct block {
    float value;   /* uses, each counting less with every step since: what replacement goes by */
    int32_t slot;  /* −1: none */
    uint8_t state; /* below */
    uint8_t foreseen; /* by whom, for the layer's next step */
    uint8_t guessed;  /* the same, if it was in no slot then: what a seer is judged by, as to foresee what is there is of no use */
    bool pinned;   /* needed by the step that runs */
    bool used;     /* in the layer's last step */
    bool ahead;    /* read before it was needed, and not needed yet */
};
enum { BLOCK_ABSENT, BLOCK_QUEUED, BLOCK_READING, BLOCK_READY };

/* Blocks that are to be read, in order. [n_experts]: they are of one layer. */
struct read_queue {
    uint32_t *blocks;
    size_t n, next;
};

struct reader {
    struct expert_store *store;
    pthread_t thread;
    int32_t block;       /* that it reads; −1: none */
    atomic_bool give_up; /* nobody wants it any more */
};

struct expert_store {
    struct colibri_model *model;
    uint8_t *slots; /* [n_slots][slot_bytes]; NULL: experts are used where the model has them */
    size_t slot_bytes;
    uint32_t n_slots, n_experts, n_layers; /* layers with experts */
    uint32_t layer;                        /* that runs, among those */
    struct block *blocks;                  /* [n_layers × n_experts] */
    int32_t *slot_blocks;                  /* [n_slots] −1: empty */
    uint32_t n_full;                       /* slots that are not empty */
    uint32_t *missing;                     /* [n_layers] blocks that are in no slot */
    struct read_queue needed, ahead;
    size_t n_pinned, n_asked; /* groups of the layer that were asked for */
    float right[N_SEERS];     /* share of what each of them guessed that was needed, of late */
    uint8_t believed;         /* those of them who are right often enough */
    struct reader readers[COLIBRI_READERS];
    unsigned n_readers, n_reading_ahead;
    bool open, stop;
    pthread_mutex_t mutex;
    pthread_cond_t work, done;
    uint64_t hits, misses, n_ahead, n_ahead_used, wait_ns;
    _Atomic uint64_t bytes_read;
};

struct group;

/* Bytes of a slot; slots that a budget gives, at most all blocks. */
size_t colibri_slot_bytes(const struct colibri_file_header *header);
size_t colibri_slots_in(const struct colibri_file_header *header, uint64_t budget_bytes);
/* Lays out nothing: slots, blocks, slot_blocks, missing and both queues' arrays are the caller's memory. Starts the readers.
 * frequencies: [n_layers][n_experts] how often each was used elsewhere, by the step, to begin with; or NULL. */
int colibri_store_open(struct expert_store *store, struct colibri_model *model, const float *frequencies, struct colibri_error error);
void colibri_store_close(struct expert_store *store);

/* A layer's step: its groups are known. Counts hits and misses, and asks for as many groups as there are slots, from the first. */
void colibri_store_begin(struct expert_store *store, size_t first_block, const struct group *groups, size_t n_groups);
/* Waits until any of groups [begin, end) is there; puts those that are to the front of the range and returns how many. */
size_t colibri_store_wait(struct expert_store *store, struct group *groups, size_t begin, size_t end);
/* Groups [begin, end) are computed: their slots may be used for others, which are asked for. */
void colibri_store_release(struct expert_store *store, const struct group *groups, size_t begin, size_t end, size_t n_groups);
/* Is any expert of the layer (among those with experts) in no slot, so that looking ahead is worth while? */
bool colibri_store_misses(struct expert_store *store, uint32_t layer);
/* What is foreseen for a layer that runs next: seers[n_experts], FORESEEN_*. Reads what those foresaw who are right more often than not, beginning
 * with likeliest[n_likeliest]. */
void colibri_store_foresee(struct expert_store *store, uint32_t layer, const uint8_t *seers, const int32_t *likeliest, size_t n_likeliest);
/* Was the expert used when the layer ran last? */
static inline bool colibri_store_used(const struct expert_store *store, uint32_t layer, uint32_t expert) {
    return store->blocks[(size_t)layer * store->n_experts + expert].used;
}
/* Of a block that is there and pinned. */
static inline const uint8_t *colibri_store_block(const struct expert_store *store, size_t block) {
    return store->slots + (size_t)store->blocks[block].slot * store->slot_bytes;
}
void colibri_store_stats(struct expert_store *store, colibri_expert_stats_t *stats);

#endif
