/*
 * The static routing table: for each layer with experts and each token id, the experts that such a token was sent to most often in a text
 * (docs/format.md, "Static tables"). It foresees what to read; with COLIBRI_ROUTING_STATIC it decides.
 */
#ifndef COLIBRI_STATIC_TABLE_H
#define COLIBRI_STATIC_TABLE_H

#include <stddef.h>
#include <stdint.h>

#include "error.h"
#include "model.h"

#define COLIBRI_TABLE_MAGIC "COLIBRT\x1a" /* 8 bytes, no terminator */
#define COLIBRI_TABLE_VERSION 1

struct table_header {
    char magic[8];
    uint32_t version, header_bytes; /* 128 */
    uint64_t file_bytes;            /* exact */
    uint64_t checksum;              /* of all behind this field */
    uint8_t fingerprint[32];        /* of the model */
    uint32_t n_layers;              /* with experts */
    uint32_t n_experts, top_k, vocabulary;
    uint64_t n_tokens; /* of the text it was learned from */
    uint8_t reserved[40];
};
_Static_assert(sizeof(struct table_header) == 128, "header is 128 bytes");

struct static_table {
    const struct table_header *header; /* of the mapping; NULL: there is no table */
    const float *frequencies;          /* [n_layers][n_experts] share of the text's tokens */
    const uint64_t *chosen;            /* [vocabulary][n_layers][n_words] top_k bits each; a token's lie together, as a step asks for one layer after the other */
    size_t n_words;
};

/* Maps and checks all of a table. E_IO, E_FORMAT, E_UNSUPPORTED, E_CHECKSUM, with the path; a table of another model is E_INVALID. */
int colibri_table_open(struct static_table *table, const struct colibri_model *model, const char *path, struct colibri_error error);
void colibri_table_close(struct static_table *table);

/* Bit e of word e / 64: expert e is chosen. */
static inline const uint64_t *colibri_look_up(const struct static_table *table, size_t layer, size_t token) {
    return table->chosen + (token * table->header->n_layers + layer) * table->n_words;
}

/* Experts in ascending order; the caller knows that there are as many bits as it has room for. */
static inline size_t colibri_list_bits(const uint64_t *words, size_t n_words, int32_t *experts) {
    size_t n = 0;
    for (size_t i = 0; i < n_words; i++)
        for (uint64_t word = words[i]; word; word &= word - 1) experts[n++] = (int32_t)(64 * i) + __builtin_ctzll(word);
    return n;
}

#endif
