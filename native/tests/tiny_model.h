/*
 * Writes tiny .colibri files with random weights, and broken ones.
 *
 * A file is built in memory, may be changed there in any way, is sealed (all checksums as they should be) and written to a temporary path.
 */
#ifndef COLIBRI_TESTS_TINY_MODEL_H
#define COLIBRI_TESTS_TINY_MODEL_H

#include <stddef.h>
#include <stdint.h>

#include "colibri.h"
#include "file_format.h"

struct tiny_model {
    uint8_t *bytes;
    size_t n_bytes;
    struct colibri_file_header *header; /* the three point into bytes */
    struct colibri_file_tensor *tensors;
    uint64_t *expert_checksums;
    char path[256]; /* once written */
};

/* Three layers of 6 experts, of which 2 are chosen; the one in the middle is dense. Four query heads on two KV heads. No width
 * is a multiple of 32. */
enum { TINY_VOCABULARY = 99, TINY_LAYERS = 3, TINY_EXPERTS = 6, TINY_TOP_K = 2, TINY_END_TOKEN = 98, TINY_POSITIONS = 1024 };

/* format: of all matrices. flags: COLIBRI_ARCH_*; any that the engine implements. */
struct tiny_model tiny_build(uint32_t format, uint32_t flags, uint64_t seed);
/* The tensor's entry; the test fails if it is not there. */
struct colibri_file_tensor *tiny_tensor(const struct tiny_model *model, uint32_t role, uint32_t layer);
/* Its weight (row, col), of a vector or a matrix in f32. */
float *tiny_weight(const struct tiny_model *model, uint32_t role, uint32_t layer, size_t row, size_t col);
/* Multiplies a whole tensor in f32. */
void tiny_scale(const struct tiny_model *model, uint32_t role, uint32_t layer, float by);
/* Makes all checksums right. */
void tiny_seal(const struct tiny_model *model);
/* Makes the header's checksum right: for lies in other fields. */
void tiny_seal_header(const struct tiny_model *model);
/* Writes the first n_bytes to a temporary file, or to the one written before. */
void tiny_write(struct tiny_model *model, size_t n_bytes);
/* Removes the file and frees. */
void tiny_discard(struct tiny_model *model);

/* Builds, seals, writes and opens. */
struct colibri_model *tiny_open(struct tiny_model *file, uint32_t format, uint32_t flags, uint64_t seed);

#endif
