/*
 * One pool of threads for a context. Work is a number of items; threads take them one by one until none is left.
 *
 * Only the thread that owns the context calls colibri_pool_run, one job at a time. No thread allocates or takes a lock while a
 * job runs, unless it goes to sleep or wakes sleepers.
 */
#ifndef COLIBRI_THREADS_H
#define COLIBRI_THREADS_H

#include <pthread.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>

#include "error.h"

#define COLIBRI_MAX_THREADS 1024

/* Computes one item. worker: 0 for the caller, below n_threads for all; two items of one worker never run at once. */
typedef void task_fn(void *job, size_t item, unsigned worker);

struct worker {
    struct pool *pool;
    pthread_t thread;
    unsigned number;
};

struct pool {
    /* Number of the job (high half) and of its next item (low half). One word, so that an item can only be taken from the job that the
     * taker has read about. */
    _Alignas(64) _Atomic uint64_t next;
    _Atomic(task_fn *) task;
    _Atomic(void *) job;
    _Atomic uint32_t n_items;
    _Atomic unsigned n_threads;
    _Alignas(64) _Atomic uint32_t n_done;
    _Alignas(64) atomic_uint n_sleepers;
    atomic_bool caller_sleeps, stop;
    pthread_mutex_t mutex;
    pthread_cond_t work, done;
    unsigned n_workers; /* threads started, without the caller */
    struct worker *workers;
};

/* Starts n_threads − 1 threads; workers: [n_threads − 1], the caller's memory. */
int colibri_pool_open(struct pool *pool, struct worker *workers, unsigned n_threads, struct colibri_error error);
void colibri_pool_close(struct pool *pool);
/* Runs task(job, 0 … n_items − 1) on up to n_threads threads, the caller among them, and returns when all are done. */
void colibri_pool_run(struct pool *pool, unsigned n_threads, size_t n_items, task_fn *task, void *job);

/* Of the monotonic clock. */
int64_t colibri_now_ns(void);

/* cores.c: processors that this process may use, by affinity and cgroup quota; at least 1. */
unsigned colibri_usable_cores(void);

#endif
