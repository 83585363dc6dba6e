/*
 * How many processors this process may use: its affinity mask, cut by the CPU quota of its cgroup and of those above it. A container that is
 * given 2 of 64 cores by quota would otherwise start 64 threads that are throttled in turn.
 */
#include <sched.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "threads.h"

#if defined(__linux__)

static unsigned by_affinity(void) {
    cpu_set_t set;
    if (sched_getaffinity(0, sizeof set, &set) == 0) return (unsigned)CPU_COUNT(&set);
    long online = sysconf(_SC_NPROCESSORS_ONLN);
    return online > 0 ? (unsigned)online : 1;
}

/* quota / period, rounded up, at least 1; `limit` where there is no quota. */
static unsigned cores_of(long long quota, long long period, unsigned limit) {
    if (quota <= 0 || period <= 0) return limit;
    long long cores = (quota + period - 1) / period;
    return cores < limit ? (unsigned)cores : limit;
}

static unsigned by_cpu_max(const char *folder, unsigned limit) {
    char path[4200];
    long long quota = 0, period = 0;
    snprintf(path, sizeof path, "/sys/fs/cgroup%s/cpu.max", folder);
    FILE *file = fopen(path, "re");
    if (!file) return limit;
    int n = fscanf(file, "%lld %lld", &quota, &period); /* "max 100000" reads no number: no quota */
    fclose(file);
    return n == 2 ? cores_of(quota, period, limit) : limit;
}

static long long read_number(const char *path) {
    long long number = -1;
    FILE *file = fopen(path, "re");
    if (!file) return -1;
    if (fscanf(file, "%lld", &number) != 1) number = -1;
    fclose(file);
    return number;
}

/* The folder of this process in the unified hierarchy (the line "0::/…"); "" if there is none. */
static void own_cgroup(char *folder, size_t bytes) {
    char line[4096];
    folder[0] = 0;
    FILE *file = fopen("/proc/self/cgroup", "re");
    if (!file) return;
    while (fgets(line, sizeof line, file)) {
        if (strncmp(line, "0::", 3) != 0) continue;
        line[strcspn(line, "\n")] = 0;
        snprintf(folder, bytes, "%s", line + 3);
    }
    fclose(file);
}

unsigned colibri_usable_cores(void) {
    char folder[4096];
    unsigned cores = by_affinity();
    own_cgroup(folder, sizeof folder);
    for (;;) {
        cores = by_cpu_max(folder, cores);
        char *slash = strrchr(folder, '/');
        if (!slash) break;
        *slash = 0;
    }
    cores = cores_of(read_number("/sys/fs/cgroup/cpu/cpu.cfs_quota_us"), read_number("/sys/fs/cgroup/cpu/cpu.cfs_period_us"), cores);
    return cores < 1 ? 1 : cores > COLIBRI_MAX_THREADS ? COLIBRI_MAX_THREADS : cores;
}

#else

unsigned colibri_usable_cores(void) {
    long online = sysconf(_SC_NPROCESSORS_ONLN);
    return online < 1 ? 1 : online > COLIBRI_MAX_THREADS ? COLIBRI_MAX_THREADS : (unsigned)online;
}

#endif
