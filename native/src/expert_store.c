/*
 * The store of experts.
 *
 * Replacement: a block's value is the number of its uses, each weighed by 2^(−age / half-life) in steps of its layer, so it goes by recency and
 * frequency both (as LRFU, Lee et al. 2001). The least valuable goes first. Among equals it is the one whose layer comes last: layers run in a
 * circle, and of a circle that does not fit, dropping the oldest would drop just what is needed next.
 *
 * Reading ahead: while a layer computes, readers have time for what the next one may need. What is needed goes first, always; what nobody turned
 * out to need is given up, in the middle if it is under way. Each seer is believed while it is right more often than not, and judged in any case.
 */
#include "expert_store.h"

#include <errno.h>
#include <string.h>

#include "context.h"

/* 2^(−1/32): a use counts half after 32 steps, some seconds of talk. */
#define DECAY 0.978572f
/* The last dozen of verdicts decide whether a seer is believed. */
#define VERDICT_WEIGHT 0.1f
#define BELIEVED 0.5f
/* Of the readers, so many read ahead: enough to keep a disk at work, few enough that the likeliest is there before the next is begun. */
#define READ_AHEAD_AT_ONCE 2

size_t colibri_slot_bytes(const struct colibri_file_header *header) { return colibri_round_up(header->expert_bytes, COLIBRI_DIRECT_BYTES); }

size_t colibri_slots_in(const struct colibri_file_header *header, uint64_t budget_bytes) {
    return colibri_smaller(budget_bytes / colibri_slot_bytes(header), header->n_expert_blocks);
}

static uint32_t layer_of(const struct expert_store *store, size_t block) { return (uint32_t)(block / store->n_experts); }

/* ---- slots; the mutex is held ---- */

static bool is_expected(const struct expert_store *store, const struct block *block) { return block->foreseen & store->believed; }

/* How many layers run before this one does again. */
static uint32_t distance(const struct expert_store *store, size_t block) {
    return (layer_of(store, block) + store->n_layers - store->layer - 1) % store->n_layers;
}

/* A slot for a block to be read: an empty one, or that of the least valuable block that may go. What is foreseen goes late, and only for what is
 * needed. −1: there is none now. */
static int32_t free_slot(const struct expert_store *store, bool needed) {
    int32_t best = -1;
    float least = 0;
    uint32_t farthest = 0;
    for (uint32_t slot = 0; slot < store->n_slots; slot++) {
        int32_t number = store->slot_blocks[slot];
        if (number < 0) return (int32_t)slot;
        const struct block *block = &store->blocks[number];
        if (block->state != BLOCK_READY || block->pinned || (is_expected(store, block) && !needed)) continue;
        float value = block->value + (is_expected(store, block) ? 1 : 0);
        uint32_t far = distance(store, (size_t)number);
        if (best >= 0 && (value > least || (!(value < least) && far <= farthest))) continue;
        best = (int32_t)slot;
        least = value;
        farthest = far;
    }
    return best;
}

static void put_in_slot(struct expert_store *store, int32_t slot, uint32_t number) {
    int32_t before = store->slot_blocks[slot];
    if (before >= 0) {
        store->blocks[before].state = BLOCK_ABSENT;
        store->blocks[before].slot = -1;
        store->blocks[before].ahead = false;
        store->missing[layer_of(store, (size_t)before)]++;
    } else {
        store->n_full++;
    }
    store->slot_blocks[slot] = (int32_t)number;
    store->blocks[number].slot = slot;
    store->blocks[number].state = BLOCK_READING;
    store->missing[layer_of(store, number)]--;
}

static void empty_slot(struct expert_store *store, uint32_t number) {
    store->slot_blocks[store->blocks[number].slot] = -1;
    store->blocks[number].slot = -1;
    store->blocks[number].state = BLOCK_ABSENT;
    store->blocks[number].ahead = false;
    store->missing[layer_of(store, number)]++;
    store->n_full--;
}

/* ---- readers ---- */

static bool has_next(const struct read_queue *queue) { return queue->next < queue->n; }

/* Takes the next block to be read and gives it a slot. −1 if there is nothing to read, or no slot for it. */
static int32_t next_block(struct expert_store *store) {
    bool needed = has_next(&store->needed);
    struct read_queue *queue = needed ? &store->needed : &store->ahead;
    if (!has_next(queue) || (!needed && store->n_reading_ahead == READ_AHEAD_AT_ONCE)) return -1;
    int32_t slot = free_slot(store, needed);
    if (slot < 0) return -1;
    uint32_t number = queue->blocks[queue->next++];
    put_in_slot(store, slot, number);
    if (!needed) {
        store->blocks[number].ahead = true;
        store->n_ahead++;
        store->n_reading_ahead++;
    }
    return (int32_t)number;
}

/* Reads a block into its slot. A file that fails gives zeros, as a mapped one does (lost_pages.c). */
static bool read_block(struct reader *reader, uint32_t number) {
    struct expert_store *store = reader->store;
    uint8_t *to = store->slots + (size_t)store->blocks[number].slot * store->slot_bytes;
    int failed = colibri_read_block(store->model, number, to, &reader->give_up, &store->bytes_read);
    if (failed == ECANCELED) return false;
    if (failed) {
        memset(to, 0, store->slot_bytes);
        atomic_store(&store->model->lost, true);
    }
    return true;
}

static void *run_reader(void *argument) {
    struct reader *reader = argument;
    struct expert_store *store = reader->store;
    pthread_mutex_lock(&store->mutex);
    while (!store->stop) {
        int32_t number = next_block(store);
        if (number < 0) {
            pthread_cond_wait(&store->work, &store->mutex);
            continue;
        }
        bool ahead = store->blocks[number].ahead;
        reader->block = number;
        atomic_store(&reader->give_up, false);
        pthread_mutex_unlock(&store->mutex);
        bool there = read_block(reader, (uint32_t)number);
        pthread_mutex_lock(&store->mutex);
        reader->block = -1;
        store->n_reading_ahead -= ahead;
        struct block *block = &store->blocks[number];
        if (there) {
            block->state = BLOCK_READY;
        } else {
            empty_slot(store, (uint32_t)number);
            if (block->pinned) { /* needed after all */
                block->state = BLOCK_QUEUED;
                store->needed.blocks[store->needed.n++] = (uint32_t)number;
            }
        }
        pthread_cond_broadcast(&store->done);
        pthread_cond_broadcast(&store->work); /* a slot that may be taken */
    }
    pthread_mutex_unlock(&store->mutex);
    return NULL;
}

/* ---- what a step needs ---- */

static void judge(struct expert_store *store, size_t first_block) {
    for (unsigned seer = 0; seer < N_SEERS; seer++) {
        unsigned n = 0, n_right = 0;
        for (uint32_t i = 0; i < store->n_experts; i++) {
            const struct block *block = &store->blocks[first_block + i];
            if (!(block->guessed >> seer & 1)) continue;
            n++;
            n_right += block->used;
        }
        if (n) store->right[seer] += VERDICT_WEIGHT * ((float)n_right / (float)n - store->right[seer]);
        uint8_t bit = (uint8_t)(1u << seer);
        store->believed = (uint8_t)(store->right[seer] >= BELIEVED ? store->believed | bit : store->believed & ~bit);
    }
}

static void empty_ahead(struct expert_store *store) {
    for (; has_next(&store->ahead); store->ahead.next++) store->blocks[store->ahead.blocks[store->ahead.next]].state = BLOCK_ABSENT;
    store->ahead.n = store->ahead.next = 0;
}

/* What was foreseen and not needed is not read. */
static void forget_ahead(struct expert_store *store, size_t first_block) {
    empty_ahead(store);
    for (uint32_t i = 0; i < store->n_experts; i++) store->blocks[first_block + i].foreseen = store->blocks[first_block + i].guessed = 0;
    for (unsigned i = 0; i < store->n_readers; i++) {
        int32_t number = store->readers[i].block;
        if (number >= 0 && store->blocks[number].ahead && !store->blocks[number].used) atomic_store(&store->readers[i].give_up, true);
    }
}

static void need(struct expert_store *store, size_t number) {
    struct block *block = &store->blocks[number];
    block->pinned = true;
    store->n_pinned++;
    if (block->state != BLOCK_ABSENT) return;
    block->state = BLOCK_QUEUED;
    store->needed.blocks[store->needed.n++] = (uint32_t)number;
}

static void need_more(struct expert_store *store, const struct group *groups, size_t n_groups) {
    for (; store->n_asked < n_groups && store->n_pinned < store->n_slots; store->n_asked++) need(store, groups[store->n_asked].block);
    if (has_next(&store->needed)) pthread_cond_broadcast(&store->work);
}

void colibri_store_begin(struct expert_store *store, size_t first_block, const struct group *groups, size_t n_groups) {
    pthread_mutex_lock(&store->mutex);
    store->layer = layer_of(store, first_block);
    for (uint32_t i = 0; i < store->n_experts; i++) {
        store->blocks[first_block + i].value *= DECAY;
        store->blocks[first_block + i].used = false;
    }
    for (size_t i = 0; i < n_groups; i++) {
        struct block *block = &store->blocks[groups[i].block];
        block->used = true;
        block->value += 1;
        if (block->state == BLOCK_READY) store->hits++;
        else store->misses++;
        store->n_ahead_used += block->ahead;
    }
    judge(store, first_block);
    forget_ahead(store, first_block);
    for (size_t i = 0; i < n_groups; i++) store->blocks[groups[i].block].ahead = false;
    store->needed.n = store->needed.next = store->n_asked = 0;
    need_more(store, groups, n_groups);
    pthread_mutex_unlock(&store->mutex);
}

/* Puts the groups that are there to the front; returns how many. */
static size_t sort_ready(const struct expert_store *store, struct group *groups, size_t n_groups) {
    size_t n = 0;
    for (size_t i = 0; i < n_groups; i++) {
        if (store->blocks[groups[i].block].state != BLOCK_READY) continue;
        struct group ready = groups[i];
        groups[i] = groups[n];
        groups[n++] = ready;
    }
    return n;
}

size_t colibri_store_wait(struct expert_store *store, struct group *groups, size_t begin, size_t end) {
    pthread_mutex_lock(&store->mutex);
    size_t n_asked = colibri_smaller(end, store->n_asked) - begin, n = sort_ready(store, groups + begin, n_asked);
    if (n == 0) {
        int64_t since = colibri_now_ns();
        while ((n = sort_ready(store, groups + begin, n_asked)) == 0) pthread_cond_wait(&store->done, &store->mutex);
        store->wait_ns += (uint64_t)(colibri_now_ns() - since);
    }
    pthread_mutex_unlock(&store->mutex);
    return n;
}

void colibri_store_release(struct expert_store *store, const struct group *groups, size_t begin, size_t end, size_t n_groups) {
    pthread_mutex_lock(&store->mutex);
    for (size_t i = begin; i < end; i++) store->blocks[groups[i].block].pinned = false;
    store->n_pinned -= end - begin;
    need_more(store, groups, n_groups);
    pthread_mutex_unlock(&store->mutex);
}

/* ---- what the next layer may need ---- */

bool colibri_store_misses(struct expert_store *store, uint32_t layer) {
    pthread_mutex_lock(&store->mutex);
    bool misses = store->missing[layer] > 0;
    pthread_mutex_unlock(&store->mutex);
    return misses;
}

static void read_ahead(struct expert_store *store, size_t number) {
    struct block *block = &store->blocks[number];
    if (!is_expected(store, block) || block->state != BLOCK_ABSENT) return;
    block->state = BLOCK_QUEUED;
    store->ahead.blocks[store->ahead.n++] = (uint32_t)number;
}

void colibri_store_foresee(struct expert_store *store, uint32_t layer, const uint8_t *seers, const int32_t *likeliest, size_t n_likeliest) {
    size_t first_block = (size_t)layer * store->n_experts;
    pthread_mutex_lock(&store->mutex);
    empty_ahead(store);
    for (uint32_t i = 0; i < store->n_experts; i++) {
        struct block *block = &store->blocks[first_block + i];
        block->foreseen = seers[i];
        block->guessed = block->state == BLOCK_ABSENT ? seers[i] : 0;
    }
    for (size_t i = 0; i < n_likeliest; i++) read_ahead(store, first_block + (size_t)likeliest[i]);
    for (uint32_t i = 0; i < store->n_experts; i++) read_ahead(store, first_block + i);
    if (store->ahead.n) pthread_cond_broadcast(&store->work);
    pthread_mutex_unlock(&store->mutex);
}

/* ---- open, close, figures ---- */

void colibri_store_stats(struct expert_store *store, colibri_expert_stats_t *stats) {
    *stats = (colibri_expert_stats_t){.struct_bytes = sizeof *stats};
    if (!store->open) return;
    pthread_mutex_lock(&store->mutex);
    stats->slots = store->n_slots;
    stats->slot_bytes = store->slot_bytes;
    stats->slots_used = store->n_full;
    stats->hits = store->hits;
    stats->misses = store->misses;
    stats->read_ahead = store->n_ahead;
    stats->read_ahead_used = store->n_ahead_used;
    stats->wait_ns = store->wait_ns;
    stats->bytes_read = atomic_load_explicit(&store->bytes_read, memory_order_relaxed);
    pthread_mutex_unlock(&store->mutex);
}

int colibri_store_open(struct expert_store *store, struct colibri_model *model, const float *frequencies, struct colibri_error error) {
    store->model = model;
    for (size_t i = 0; i < (size_t)store->n_layers * store->n_experts; i++) {
        store->blocks[i].slot = -1;
        if (frequencies) store->blocks[i].value = frequencies[i] / (1 - DECAY); /* what it would be after many such steps */
    }
    for (uint32_t i = 0; i < store->n_slots; i++) store->slot_blocks[i] = -1;
    for (uint32_t i = 0; i < store->n_layers; i++) store->missing[i] = store->n_experts;
    for (unsigned i = 0; i < N_SEERS; i++) store->right[i] = 1;
    store->believed = (1 << N_SEERS) - 1;
    pthread_mutex_init(&store->mutex, NULL);
    pthread_cond_init(&store->work, NULL);
    pthread_cond_init(&store->done, NULL);
    store->open = true;
    for (unsigned i = 0; i < COLIBRI_READERS; i++) {
        store->readers[i] = (struct reader){.store = store, .block = -1};
        int failed = pthread_create(&store->readers[i].thread, NULL, run_reader, &store->readers[i]);
        if (failed) return colibri_fail(error, COLIBRI_E_NOMEM, "starting reader %u of %u: %s", i + 1, COLIBRI_READERS, strerror(failed));
        pthread_mutex_lock(&store->mutex);
        store->n_readers++;
        pthread_mutex_unlock(&store->mutex);
    }
    return COLIBRI_OK;
}

void colibri_store_close(struct expert_store *store) {
    if (!store->open) return;
    pthread_mutex_lock(&store->mutex);
    store->stop = true;
    for (unsigned i = 0; i < store->n_readers; i++) atomic_store(&store->readers[i].give_up, true);
    pthread_cond_broadcast(&store->work);
    pthread_mutex_unlock(&store->mutex);
    for (unsigned i = 0; i < store->n_readers; i++) pthread_join(store->readers[i].thread, NULL);
    pthread_cond_destroy(&store->done);
    pthread_cond_destroy(&store->work);
    pthread_mutex_destroy(&store->mutex);
}
