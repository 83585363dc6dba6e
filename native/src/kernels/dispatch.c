/*
 * Which table to use. This file alone asks the CPU, and believes it only so far: before a table is handed out, each of its functions runs a
 * small problem and must equal the scalar table bit for bit (trial.c).
 */
#define _GNU_SOURCE /* syscall */

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kernels.h"
#include "trial.h"

#if defined(COLIBRI_HAVE_AVX2) || defined(COLIBRI_HAVE_AVX512VNNI)
#include <cpuid.h>
#endif
#ifdef COLIBRI_HAVE_AMX
#include <sys/syscall.h>
#include <unistd.h>
#endif

extern const struct colibri_kernels colibri_kernels_scalar;
#ifdef COLIBRI_HAVE_AVX512VNNI
extern const struct colibri_kernels colibri_kernels_avx512vnni;
#endif
#ifdef COLIBRI_HAVE_AMX
extern const struct colibri_kernels colibri_kernels_amx;
#endif
#ifdef COLIBRI_HAVE_AVX2
extern const struct colibri_kernels colibri_kernels_avx2, colibri_kernels_avxvnni;
#endif

/* ---- what the CPU and the operating system say ---- */

#if defined(COLIBRI_HAVE_AVX2) || defined(COLIBRI_HAVE_AVX512VNNI)

/* One bit of one register of one CPUID leaf. */
struct feature {
    const char *name;
    unsigned leaf, subleaf;
    enum { EAX, EBX, ECX, EDX } in;
    unsigned bit;
};

#define FMA {"FMA", 1, 0, ECX, 12}
#define F16C {"F16C", 1, 0, ECX, 29}
#define AVX2 {"AVX2", 7, 0, EBX, 5}
#define AVX_VNNI {"AVX_VNNI", 7, 1, EAX, 4}
#define AVX512F {"AVX512F", 7, 0, EBX, 16}
#define AVX512DQ {"AVX512DQ", 7, 0, EBX, 17}
#define AVX512BW {"AVX512BW", 7, 0, EBX, 30}
#define AVX512VL {"AVX512VL", 7, 0, EBX, 31}
#define AVX512_VNNI {"AVX512_VNNI", 7, 0, ECX, 11}
#define AMX_TILE {"AMX_TILE", 7, 0, EDX, 24}
#define AMX_INT8 {"AMX_INT8", 7, 0, EDX, 25}

static const char *hidden_feature = "";

static int cpu_has(const struct feature *f)
{
    unsigned r[4];
    if (strcmp(f->name, hidden_feature) == 0) return 0;
    return __get_cpuid_count(f->leaf, f->subleaf, &r[0], &r[1], &r[2], &r[3]) && r[f->in] >> f->bit & 1;
}

/* XCR0 tells which registers the operating system saves: bits 1 and 2 are xmm and ymm, 5 to 7 the masks and zmm, 17 and 18 AMX's tiles. */
static int system_saves(unsigned mask)
{
    static const struct feature OSXSAVE = {"OSXSAVE", 1, 0, ECX, 27};
    if (!cpu_has(&OSXSAVE)) return 0;
    unsigned low, high;
    __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    return (low & mask) == mask;
}

/* NULL, or what is missing. */
static const char *missing(unsigned saved, const struct feature *features)
{
    for (; features->name; features++)
        if (!cpu_has(features)) return features->name;
    return system_saves(saved) ? NULL : "an operating system that saves its registers";
}

#define REQUIRES(name, saved, ...)                                  \
    static const char *name(void)                                   \
    {                                                               \
        static const struct feature features[] = {__VA_ARGS__, {0}}; \
        return missing(saved, features);                            \
    }
#ifdef COLIBRI_HAVE_AVX2
REQUIRES(avx2_lacks, 0x06, AVX2, FMA, F16C)
REQUIRES(avxvnni_lacks, 0x06, AVX2, FMA, F16C, AVX_VNNI)
#endif
#ifdef COLIBRI_HAVE_AVX512VNNI
REQUIRES(avx512vnni_lacks, 0xe6, AVX2, FMA, F16C, AVX512F, AVX512DQ, AVX512BW, AVX512VL, AVX512_VNNI)
#endif
#ifdef COLIBRI_HAVE_AMX
REQUIRES(amx_features_lack, 0x600e6, AVX2, FMA, F16C, AVX512F, AVX512DQ, AVX512BW, AVX512VL, AVX512_VNNI, AMX_TILE, AMX_INT8)

/* Linux keeps the tile registers from a process until it asks: a thread that uses them has 8 KiB more to save. */
#define REQUEST_PERMISSION 0x1023 /* ARCH_REQ_XCOMP_PERM */
#define TILE_DATA 18
static const char *amx_lacks(void)
{
    const char *lacking = amx_features_lack();
    if (lacking) return lacking;
    return syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) == 0 ? NULL : "the system's leave to use tile registers";
}
#endif

void colibri_kernels_hide_feature(const char *name) { hidden_feature = name; }

#else

void colibri_kernels_hide_feature(const char *name) { (void)name; }

#endif

static const char *scalar_lacks(void) { return NULL; }

static const struct isa {
    const struct colibri_kernels *table;
    const char *(*lacks)(void); /* NULL, or what the CPU lacks for it */
} isas[] = {
#ifdef COLIBRI_HAVE_AMX
    {&colibri_kernels_amx, amx_lacks},
#endif
#ifdef COLIBRI_HAVE_AVX512VNNI
    {&colibri_kernels_avx512vnni, avx512vnni_lacks},
#endif
#ifdef COLIBRI_HAVE_AVX2
    {&colibri_kernels_avxvnni, avxvnni_lacks},
    {&colibri_kernels_avx2, avx2_lacks},
#endif
    {&colibri_kernels_scalar, scalar_lacks},
};
#define N_ISAS (sizeof isas / sizeof isas[0])

const char *const colibri_isa_names[] = {
#ifdef COLIBRI_HAVE_AMX
    "amx",
#endif
#ifdef COLIBRI_HAVE_AVX512VNNI
    "avx512vnni",
#endif
#ifdef COLIBRI_HAVE_AVX2
    "avxvnni",
    "avx2",
#endif
    "scalar",
    NULL,
};

/* NULL, or why this table is not to be used here: a clause whose subject is the table's name. */
static const char *verdict(const struct isa *isa, char *text, size_t n)
{
    static enum { UNKNOWN, PASSES, FAILS } known[N_ISAS];
    static const char *reasons[N_ISAS];
    size_t i = (size_t)(isa - isas);
    const char *lacking = isa->lacks();
    if (lacking) {
        snprintf(text, n, "needs %s", lacking);
        return text;
    }
    if (isa->table == &colibri_kernels_scalar) return NULL;
    if (known[i] == UNKNOWN) {
        reasons[i] = colibri_kernels_trial(isa->table, &colibri_kernels_scalar);
        known[i] = reasons[i] ? FAILS : PASSES;
    }
    return reasons[i];
}

/* ---- public ---- */

static const struct isa *find(const char *name)
{
    for (size_t i = 0; i < N_ISAS; i++)
        if (strcmp(isas[i].table->name, name) == 0) return &isas[i];
    return NULL;
}

static void say_unknown(const char *name, char *err, size_t err_bytes)
{
    char known[128] = "";
    for (size_t i = 0; i < N_ISAS; i++) {
        size_t used = strlen(known);
        snprintf(known + used, sizeof known - used, "%s%s", i ? ", " : "", isas[i].table->name);
    }
    snprintf(err, err_bytes, "instruction set '%s' is unknown to this build; it knows %s", name, known);
}

const struct colibri_kernels *colibri_kernels_built(const char *name)
{
    const struct isa *isa = find(name);
    return isa ? isa->table : NULL;
}

const struct colibri_kernels *colibri_kernels_get(const char *name, char *err, size_t err_bytes)
{
    if (err_bytes) err[0] = '\0';
    if (name == NULL) name = getenv("COLIBRI_ISA");
    char text[80];
    if (name == NULL || name[0] == '\0') {
        for (size_t i = 0; i < N_ISAS; i++)
            if (verdict(&isas[i], text, sizeof text) == NULL) return isas[i].table;
        return NULL; /* not reached: scalar passes */
    }
    const struct isa *isa = find(name);
    if (isa == NULL) {
        say_unknown(name, err, err_bytes);
        return NULL;
    }
    const char *why = verdict(isa, text, sizeof text);
    if (why) snprintf(err, err_bytes, "instruction set '%s' %s", name, why);
    return why ? NULL : isa->table;
}
