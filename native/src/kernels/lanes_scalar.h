/*
 * Sixteen lanes in plain C: the executable form of docs/numerics.md. Every other lanes_*.h has the same functions with the same bits.
 *
 * Of maximum and minimum the second operand is returned where the comparison is false, so for NaN and for equal zeros: what x86 does.
 */
#ifndef COLIBRI_LANES_SCALAR_H
#define COLIBRI_LANES_SCALAR_H

#include <float.h>
#include <math.h>
#include <stdint.h>
#include <string.h>

#include "inline.h"
#include "layout.h"

#if FLT_EVAL_METHOD != 0
#error "float arithmetic must be done in float: x87 registers round twice"
#endif

#define LANES_INLINE KERNELS_INLINE
/* A long function is called here: copies of vf_exp over 16 separate lanes took three quarters of this build's time. */
#define LONG_INLINE static __attribute__((noinline))
#define EACH_LANE _Pragma("GCC unroll 1") for (int i = 0; i < 16; i++)

/* What fits the registers (see matmul.inc, attention.inc): accumulators of 16 lanes at a time, and at most how many rows or queries share a
 * load of weights, K or V. Here 16 lanes alone are more than fits. */
#define WIDE_ACCUMULATORS 1
#define WIDE_MOST_ROWS 1
#define DOT_ACCUMULATORS 1
#define DOT_MOST_ROWS 1
#define DOT_ROWS 1 /* of one group_dot */
#define SCORE_QUERIES 1
#define VALUE_ACCUMULATORS 1
#define VALUE_QUERIES 1

typedef struct { float x[16]; } vf;
typedef struct { uint32_t x[16]; } vi; /* unsigned, so that wrapping is defined; signed where an operation says so */

LANES_INLINE uint32_t bits_of(float x) { uint32_t u; memcpy(&u, &x, 4); return u; }
LANES_INLINE float float_of(uint32_t u) { float x; memcpy(&x, &u, 4); return x; }

/*
 * a × b + c rounded once. The product of two floats is exact in double; the sum is rounded to odd (Boldo & Melquiond 2008: the last bit is set
 * where anything was lost), and rounding that to float is right, since double has more than two bits to spare.
 */
LANES_INLINE float lane_fma(float a, float b, float c)
{
#ifdef FP_FAST_FMAF
    return fmaf(a, b, c);
#else
    double product = (double)a * b, addend = c;
    double sum = product + addend;
    double part = sum - product;
    double lost = (product - (sum - part)) + (addend - part); /* exact (Knuth's TwoSum); NaN where the sum is not finite */
    int64_t bits;
    memcpy(&bits, &sum, 8);
    int64_t towards = (lost > 0) == (sum > 0) ? 1 : -1;
    int64_t inexact_and_even = ((lost > 0) | (lost < 0)) & ~bits & 1;
    bits += inexact_and_even * towards;
    memcpy(&sum, &bits, 8);
    return (float)sum;
#endif
}

LANES_INLINE float lane_of_bf16(uint16_t h) { return float_of((uint32_t)h << 16); }

LANES_INLINE float lane_of_f16(uint16_t h)
{
    uint32_t sign = (uint32_t)(h & 0x8000) << 16, exponent = h >> 10 & 31, fraction = h & 0x3ff;
    if (exponent == 31) return float_of(sign | 0x7f800000 | fraction << 13 | (fraction ? 0x400000 : 0)); /* NaN becomes quiet */
    if (exponent == 0) return float_of(sign | bits_of((float)fraction * 0x1p-24f));
    return float_of(sign | (exponent + 112) << 23 | fraction << 13);
}

/* Round to nearest even; too large becomes infinity; NaN keeps its upper bits and becomes quiet. */
LANES_INLINE uint16_t lane_to_f16(float x)
{
    uint32_t sign = bits_of(x) >> 16 & 0x8000, magnitude = bits_of(x) & 0x7fffffff;
    if (magnitude > 0x7f800000) return (uint16_t)(sign | 0x7e00 | (magnitude >> 13 & 0x3ff));
    if (magnitude >= 0x477ff000) return (uint16_t)(sign | 0x7c00); /* 65520 and above */
    if (magnitude < 0x38800000) /* below 2^-14: adding 0.5 rounds at the half's last subnormal place, 2^-24 */
        return (uint16_t)(sign | (bits_of(float_of(magnitude) + 0.5f) - bits_of(0.5f)));
    uint32_t odd = magnitude >> 13 & 1;
    return (uint16_t)(sign | ((magnitude - (112u << 23) + 0xfff + odd) >> 13));
}

LANES_INLINE vf vf_set1(float a) { vf r; EACH_LANE r.x[i] = a; return r; }
LANES_INLINE vf vf_load(const void *p) { vf r; memcpy(&r, p, sizeof r); return r; }
LANES_INLINE void vf_store(void *p, vf a) { memcpy(p, &a, sizeof a); }
LANES_INLINE vf vf_add(vf a, vf b) { EACH_LANE a.x[i] += b.x[i]; return a; }
LANES_INLINE vf vf_sub(vf a, vf b) { EACH_LANE a.x[i] -= b.x[i]; return a; }
LANES_INLINE vf vf_mul(vf a, vf b) { EACH_LANE a.x[i] *= b.x[i]; return a; }
LANES_INLINE vf vf_div(vf a, vf b) { EACH_LANE a.x[i] /= b.x[i]; return a; }
LANES_INLINE vf vf_fma(vf a, vf b, vf c) { EACH_LANE a.x[i] = lane_fma(a.x[i], b.x[i], c.x[i]); return a; }
LANES_INLINE vf vf_max(vf a, vf b) { EACH_LANE a.x[i] = a.x[i] > b.x[i] ? a.x[i] : b.x[i]; return a; }
LANES_INLINE vf vf_min(vf a, vf b) { EACH_LANE a.x[i] = a.x[i] < b.x[i] ? a.x[i] : b.x[i]; return a; }
/* a < b ? yes : no */
LANES_INLINE vf vf_select_less(vf a, vf b, vf yes, vf no) { EACH_LANE a.x[i] = a.x[i] < b.x[i] ? yes.x[i] : no.x[i]; return a; }

LANES_INLINE vi vi_of_bits(vf a) { vi r; memcpy(&r, &a, sizeof r); return r; }
LANES_INLINE vf vf_of_bits(vi a) { vf r; memcpy(&r, &a, sizeof r); return r; }
LANES_INLINE vf vf_of_int(vi a) { vf r; EACH_LANE r.x[i] = (float)(int32_t)a.x[i]; return r; }

LANES_INLINE vi vi_set1(uint32_t a) { vi r; EACH_LANE r.x[i] = a; return r; }
LANES_INLINE vi vi_load(const void *p) { vi r; memcpy(&r, p, sizeof r); return r; }
LANES_INLINE void vi_store(void *p, vi a) { memcpy(p, &a, sizeof a); }
LANES_INLINE vi vi_add(vi a, vi b) { EACH_LANE a.x[i] += b.x[i]; return a; }
LANES_INLINE vi vi_sub(vi a, vi b) { EACH_LANE a.x[i] -= b.x[i]; return a; }
LANES_INLINE vi vi_mul(vi a, vi b) { EACH_LANE a.x[i] *= b.x[i]; return a; }
LANES_INLINE vi vi_and(vi a, vi b) { EACH_LANE a.x[i] &= b.x[i]; return a; }
LANES_INLINE vi vi_xor(vi a, vi b) { EACH_LANE a.x[i] ^= b.x[i]; return a; }
LANES_INLINE vi vi_max_unsigned(vi a, vi b) { EACH_LANE a.x[i] = a.x[i] > b.x[i] ? a.x[i] : b.x[i]; return a; }
LANES_INLINE vi vi_shift_left(vi a, int n) { EACH_LANE a.x[i] <<= n; return a; }
LANES_INLINE vi vi_shift_right(vi a, int n) { EACH_LANE a.x[i] >>= n; return a; }
/* Rounds down, as an arithmetic shift. */
LANES_INLINE vi vi_halve_signed(vi a) { EACH_LANE a.x[i] = a.x[i] >> 1 | (a.x[i] & 0x80000000); return a; }
/* The lowest byte of each lane. */
LANES_INLINE void vi_store_bytes(void *p, vi a) { uint8_t b[16]; EACH_LANE b[i] = (uint8_t)a.x[i]; memcpy(p, b, 16); }

LANES_INLINE vf vf_load_bf16(const void *p) { uint16_t h[16]; memcpy(h, p, 32); vf r; EACH_LANE r.x[i] = lane_of_bf16(h[i]); return r; }
LANES_INLINE vf vf_load_f16(const void *p) { uint16_t h[16]; memcpy(h, p, 32); vf r; EACH_LANE r.x[i] = lane_of_f16(h[i]); return r; }
LANES_INLINE void vf_store_f16(void *p, vf a) { uint16_t h[16]; EACH_LANE h[i] = lane_to_f16(a.x[i]); memcpy(p, h, 32); }

/* The tree of docs/numerics.md. */
LANES_INLINE uint32_t vi_sum(vi a) { uint32_t sum = 0; EACH_LANE sum += a.x[i]; return sum; }
LANES_INLINE uint32_t vi_largest(vi a) { uint32_t largest = 0; EACH_LANE largest = a.x[i] > largest ? a.x[i] : largest; return largest; }

LANES_INLINE float vf_tree_sum(vf a)
{
    for (int half = 8; half > 0; half /= 2)
        for (int i = 0; i < half; i++) a.x[i] += a.x[i + half];
    return a.x[0];
}
LANES_INLINE float vf_tree_max(vf a)
{
    for (int half = 8; half > 0; half /= 2)
        for (int i = 0; i < half; i++) a.x[i] = a.x[i] > a.x[i + half] ? a.x[i] : a.x[i + half];
    return a.x[0];
}

/* One group of a tile: [8][16][4] unsigned bytes; packed, that is q4, [4][16][4] of which lower halves are the first four quads, upper the last. */
typedef struct { const uint8_t *bytes; int packed; } weight_group;
LANES_INLINE weight_group group_load(const uint8_t *bytes, int packed) { return (weight_group){bytes, packed}; }
LANES_INLINE int group_byte(weight_group w, int j, int at)
{
    if (!w.packed) return w.bytes[64 * j + at];
    int pair = w.bytes[64 * (j % 4) + at];
    return q4_bytes[j < 4 ? pair & 15 : pair >> 4];
}

/* sum[r] = Σ (weight byte − 128) × q[r], for n rows of 32 integers; correction[r] = −128 × Σ q[r], as the layout has it. */
LANES_INLINE void group_dot(weight_group w, const int8_t *q, const uint8_t *correction, int n, vi *sum)
{
    for (int r = 0; r < n; r++) {
        uint32_t start;
        memcpy(&start, correction + 4 * r, 4);
        vi s = vi_set1(start);
        for (int j = 0; j < 8; j++)
            EACH_LANE for (int b = 0; b < 4; b++) s.x[i] += (uint32_t)(group_byte(w, j, 4 * i + b) * q[32 * r + 4 * j + b]);
        sum[r] = s;
    }
}

#endif
