/* Sixteen lanes in one 512-bit register: the functions of lanes_scalar.h, bit for bit. */
#ifndef COLIBRI_LANES_AVX512_H
#define COLIBRI_LANES_AVX512_H

#include <immintrin.h>
#include <math.h>
#include <stdint.h>
#include <string.h>

#include "inline.h"
#include "layout.h"

#define LANES_INLINE KERNELS_INLINE

/* Of 32 registers, 16 accumulate: twice what hides the latency of an fma on two ports; a group of weights takes 8 more. */
#define WIDE_ACCUMULATORS 16
#define WIDE_MOST_ROWS 16
#define DOT_ACCUMULATORS 4
#define DOT_MOST_ROWS 16
#define DOT_ROWS 4 /* independent sums together: a chain of 8 dpbusd is 40 cycles long */
#define SCORE_QUERIES 8
#define VALUE_ACCUMULATORS 16
#define VALUE_QUERIES 8

typedef __m512 vf;
typedef __m512i vi;

LANES_INLINE vf vf_set1(float a) { return _mm512_set1_ps(a); }
LANES_INLINE vf vf_load(const void *p) { return _mm512_loadu_ps(p); }
LANES_INLINE void vf_store(void *p, vf a) { _mm512_storeu_ps(p, a); }
LANES_INLINE vf vf_add(vf a, vf b) { return _mm512_add_ps(a, b); }
LANES_INLINE vf vf_sub(vf a, vf b) { return _mm512_sub_ps(a, b); }
LANES_INLINE vf vf_mul(vf a, vf b) { return _mm512_mul_ps(a, b); }
LANES_INLINE vf vf_div(vf a, vf b) { return _mm512_div_ps(a, b); }
LANES_INLINE vf vf_fma(vf a, vf b, vf c) { return _mm512_fmadd_ps(a, b, c); }
LANES_INLINE vf vf_max(vf a, vf b) { return _mm512_max_ps(a, b); }
LANES_INLINE vf vf_min(vf a, vf b) { return _mm512_min_ps(a, b); }
LANES_INLINE vf vf_select_less(vf a, vf b, vf yes, vf no) { return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(a, b, _CMP_LT_OQ), no, yes); }

LANES_INLINE vi vi_of_bits(vf a) { return _mm512_castps_si512(a); }
LANES_INLINE vf vf_of_bits(vi a) { return _mm512_castsi512_ps(a); }
LANES_INLINE vf vf_of_int(vi a) { return _mm512_cvtepi32_ps(a); }

LANES_INLINE vi vi_set1(uint32_t a) { return _mm512_set1_epi32((int)a); }
LANES_INLINE vi vi_load(const void *p) { return _mm512_loadu_si512(p); }
LANES_INLINE void vi_store(void *p, vi a) { _mm512_storeu_si512(p, a); }
LANES_INLINE vi vi_add(vi a, vi b) { return _mm512_add_epi32(a, b); }
LANES_INLINE vi vi_sub(vi a, vi b) { return _mm512_sub_epi32(a, b); }
LANES_INLINE vi vi_mul(vi a, vi b) { return _mm512_mullo_epi32(a, b); }
LANES_INLINE vi vi_and(vi a, vi b) { return _mm512_and_si512(a, b); }
LANES_INLINE vi vi_xor(vi a, vi b) { return _mm512_xor_si512(a, b); }
LANES_INLINE vi vi_max_unsigned(vi a, vi b) { return _mm512_max_epu32(a, b); }
LANES_INLINE vi vi_shift_left(vi a, int n) { return _mm512_sll_epi32(a, _mm_cvtsi32_si128(n)); }
LANES_INLINE vi vi_shift_right(vi a, int n) { return _mm512_srl_epi32(a, _mm_cvtsi32_si128(n)); }
LANES_INLINE vi vi_halve_signed(vi a) { return _mm512_srai_epi32(a, 1); }
LANES_INLINE void vi_store_bytes(void *p, vi a) { _mm_storeu_si128(p, _mm512_cvtepi32_epi8(a)); }

LANES_INLINE vf vf_load_bf16(const void *p)
{
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256(p)), 16));
}
LANES_INLINE vf vf_load_f16(const void *p) { return _mm512_cvtph_ps(_mm256_loadu_si256(p)); }
LANES_INLINE void vf_store_f16(void *p, vf a) { _mm256_storeu_si256(p, _mm512_cvtps_ph(a, _MM_FROUND_TO_NEAREST_INT)); }

LANES_INLINE float vf_tree_sum(vf a)
{
    __m256 b = _mm256_add_ps(_mm512_castps512_ps256(a), _mm512_extractf32x8_ps(a, 1));
    __m128 c = _mm_add_ps(_mm256_castps256_ps128(b), _mm256_extractf128_ps(b, 1));
    c = _mm_add_ps(c, _mm_movehl_ps(c, c));
    return _mm_cvtss_f32(_mm_add_ss(c, _mm_movehdup_ps(c)));
}
LANES_INLINE float vf_tree_max(vf a)
{
    __m256 b = _mm256_max_ps(_mm512_castps512_ps256(a), _mm512_extractf32x8_ps(a, 1));
    __m128 c = _mm_max_ps(_mm256_castps256_ps128(b), _mm256_extractf128_ps(b, 1));
    c = _mm_max_ps(c, _mm_movehl_ps(c, c));
    return _mm_cvtss_f32(_mm_max_ss(c, _mm_movehdup_ps(c)));
}

/* By additions that wrap: gcc's own reduction adds signed integers, for which passing 2^31 is undefined. */
LANES_INLINE uint32_t vi_sum(vi a)
{
    __m256i b = _mm256_add_epi32(_mm512_castsi512_si256(a), _mm512_extracti64x4_epi64(a, 1));
    __m128i c = _mm_add_epi32(_mm256_castsi256_si128(b), _mm256_extracti128_si256(b, 1));
    c = _mm_add_epi32(c, _mm_unpackhi_epi64(c, c));
    return (uint32_t)_mm_cvtsi128_si32(_mm_add_epi32(c, _mm_shuffle_epi32(c, 1)));
}
LANES_INLINE uint32_t vi_largest(vi a) { return _mm512_reduce_max_epu32(a); }

/* The group stays in registers over all rows of a block. */
typedef struct { __m512i quads[8]; } weight_group;
LANES_INLINE weight_group group_load(const uint8_t *bytes, int packed)
{
    weight_group w;
    const __m512i half = _mm512_set1_epi8(15), levels = _mm512_broadcast_i32x4(_mm_loadu_si128((const void *)q4_bytes));
    _Pragma("GCC unroll 8") for (int j = 0; j < 8; j++) {
        __m512i stored = _mm512_loadu_si512(bytes + 64 * (packed ? j % 4 : j));
        if (packed && j >= 4) stored = _mm512_srli_epi32(stored, 4);
        w.quads[j] = packed ? _mm512_shuffle_epi8(levels, _mm512_and_si512(stored, half)) : stored;
    }
    return w;
}

LANES_INLINE __m512i broadcast_quad(const void *p)
{
    int32_t quad;
    memcpy(&quad, p, 4);
    return _mm512_set1_epi32(quad);
}

LANES_INLINE void group_dot(weight_group w, const int8_t *q, const uint8_t *correction, int n, vi *sum)
{
    _Pragma("GCC unroll 8") for (int r = 0; r < n; r++) sum[r] = broadcast_quad(correction + 4 * r);
    _Pragma("GCC unroll 8") for (int j = 0; j < 8; j++)
        _Pragma("GCC unroll 8") for (int r = 0; r < n; r++) sum[r] = _mm512_dpbusd_epi32(sum[r], w.quads[j], broadcast_quad(q + 32 * r + 4 * j));
}

#endif
