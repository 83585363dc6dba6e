/* Sixteen lanes in two 256-bit registers: the functions of lanes_scalar.h, bit for bit. With AVX-VNNI (256 bit) or without. */
#ifndef COLIBRI_LANES_AVX2_H
#define COLIBRI_LANES_AVX2_H

#include <immintrin.h>
#include <math.h>
#include <stdint.h>
#include <string.h>

#include "inline.h"
#include "layout.h"

#define LANES_INLINE KERNELS_INLINE

/* Of 16 registers, 12 accumulate: 6 × 16 lanes. */
#define WIDE_ACCUMULATORS 6
#define WIDE_MOST_ROWS 6
#define DOT_ACCUMULATORS 4
#define DOT_MOST_ROWS 4
#define DOT_ROWS 4
#define SCORE_QUERIES 2
#define VALUE_ACCUMULATORS 4
#define VALUE_QUERIES 2

typedef struct { __m256 low, high; } vf;
typedef struct { __m256i low, high; } vi;

#define BOTH_F(operation) ((vf){operation(a.low, b.low), operation(a.high, b.high)})
#define BOTH_I(operation) ((vi){operation(a.low, b.low), operation(a.high, b.high)})

LANES_INLINE vf vf_set1(float a) { return (vf){_mm256_set1_ps(a), _mm256_set1_ps(a)}; }
LANES_INLINE vf vf_load(const void *p) { return (vf){_mm256_loadu_ps(p), _mm256_loadu_ps((const float *)p + 8)}; }
LANES_INLINE void vf_store(void *p, vf a) { _mm256_storeu_ps(p, a.low), _mm256_storeu_ps((float *)p + 8, a.high); }
LANES_INLINE vf vf_add(vf a, vf b) { return BOTH_F(_mm256_add_ps); }
LANES_INLINE vf vf_sub(vf a, vf b) { return BOTH_F(_mm256_sub_ps); }
LANES_INLINE vf vf_mul(vf a, vf b) { return BOTH_F(_mm256_mul_ps); }
LANES_INLINE vf vf_div(vf a, vf b) { return BOTH_F(_mm256_div_ps); }
LANES_INLINE vf vf_fma(vf a, vf b, vf c) { return (vf){_mm256_fmadd_ps(a.low, b.low, c.low), _mm256_fmadd_ps(a.high, b.high, c.high)}; }
LANES_INLINE vf vf_max(vf a, vf b) { return BOTH_F(_mm256_max_ps); }
LANES_INLINE vf vf_min(vf a, vf b) { return BOTH_F(_mm256_min_ps); }
LANES_INLINE vf vf_select_less(vf a, vf b, vf yes, vf no)
{
    return (vf){_mm256_blendv_ps(no.low, yes.low, _mm256_cmp_ps(a.low, b.low, _CMP_LT_OQ)),
                _mm256_blendv_ps(no.high, yes.high, _mm256_cmp_ps(a.high, b.high, _CMP_LT_OQ))};
}

LANES_INLINE vi vi_of_bits(vf a) { return (vi){_mm256_castps_si256(a.low), _mm256_castps_si256(a.high)}; }
LANES_INLINE vf vf_of_bits(vi a) { return (vf){_mm256_castsi256_ps(a.low), _mm256_castsi256_ps(a.high)}; }
LANES_INLINE vf vf_of_int(vi a) { return (vf){_mm256_cvtepi32_ps(a.low), _mm256_cvtepi32_ps(a.high)}; }

LANES_INLINE vi vi_set1(uint32_t a) { return (vi){_mm256_set1_epi32((int)a), _mm256_set1_epi32((int)a)}; }
LANES_INLINE vi vi_load(const void *p) { return (vi){_mm256_loadu_si256(p), _mm256_loadu_si256((const __m256i *)p + 1)}; }
LANES_INLINE void vi_store(void *p, vi a) { _mm256_storeu_si256(p, a.low), _mm256_storeu_si256((__m256i *)p + 1, a.high); }
LANES_INLINE vi vi_add(vi a, vi b) { return BOTH_I(_mm256_add_epi32); }
LANES_INLINE vi vi_sub(vi a, vi b) { return BOTH_I(_mm256_sub_epi32); }
LANES_INLINE vi vi_mul(vi a, vi b) { return BOTH_I(_mm256_mullo_epi32); }
LANES_INLINE vi vi_and(vi a, vi b) { return BOTH_I(_mm256_and_si256); }
LANES_INLINE vi vi_xor(vi a, vi b) { return BOTH_I(_mm256_xor_si256); }
LANES_INLINE vi vi_max_unsigned(vi a, vi b) { return BOTH_I(_mm256_max_epu32); }
LANES_INLINE vi vi_shift_left(vi a, int n) { return (vi){_mm256_slli_epi32(a.low, n), _mm256_slli_epi32(a.high, n)}; }
LANES_INLINE vi vi_shift_right(vi a, int n) { return (vi){_mm256_srli_epi32(a.low, n), _mm256_srli_epi32(a.high, n)}; }
LANES_INLINE vi vi_halve_signed(vi a) { return (vi){_mm256_srai_epi32(a.low, 1), _mm256_srai_epi32(a.high, 1)}; }
LANES_INLINE __m128i lowest_bytes(__m256i a) /* of 8 lanes, in the lower 8 bytes */
{
    __m256i in_halves = _mm256_shuffle_epi8(a, _mm256_set1_epi32(0x0c080400));
    return _mm_unpacklo_epi32(_mm256_castsi256_si128(in_halves), _mm256_extracti128_si256(in_halves, 1));
}
LANES_INLINE void vi_store_bytes(void *p, vi a) { _mm_storeu_si128(p, _mm_unpacklo_epi64(lowest_bytes(a.low), lowest_bytes(a.high))); }

LANES_INLINE vf vf_load_bf16(const void *p)
{
    return (vf){_mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128(p)), 16)),
                _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)p + 1)), 16))};
}
LANES_INLINE vf vf_load_f16(const void *p)
{
    return (vf){_mm256_cvtph_ps(_mm_loadu_si128(p)), _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p + 1))};
}
LANES_INLINE void vf_store_f16(void *p, vf a)
{
    _mm_storeu_si128(p, _mm256_cvtps_ph(a.low, _MM_FROUND_TO_NEAREST_INT));
    _mm_storeu_si128((__m128i *)p + 1, _mm256_cvtps_ph(a.high, _MM_FROUND_TO_NEAREST_INT));
}

LANES_INLINE float vf_tree_sum(vf a)
{
    __m256 b = _mm256_add_ps(a.low, a.high);
    __m128 c = _mm_add_ps(_mm256_castps256_ps128(b), _mm256_extractf128_ps(b, 1));
    c = _mm_add_ps(c, _mm_movehl_ps(c, c));
    return _mm_cvtss_f32(_mm_add_ss(c, _mm_movehdup_ps(c)));
}
LANES_INLINE float vf_tree_max(vf a)
{
    __m256 b = _mm256_max_ps(a.low, a.high);
    __m128 c = _mm_max_ps(_mm256_castps256_ps128(b), _mm256_extractf128_ps(b, 1));
    c = _mm_max_ps(c, _mm_movehl_ps(c, c));
    return _mm_cvtss_f32(_mm_max_ss(c, _mm_movehdup_ps(c)));
}

LANES_INLINE uint32_t vi_sum(vi a)
{
    __m256i b = _mm256_add_epi32(a.low, a.high);
    __m128i c = _mm_add_epi32(_mm256_castsi256_si128(b), _mm256_extracti128_si256(b, 1));
    c = _mm_add_epi32(c, _mm_shuffle_epi32(c, 0x4e));
    return (uint32_t)_mm_cvtsi128_si32(_mm_add_epi32(c, _mm_shuffle_epi32(c, 0xb1)));
}
LANES_INLINE uint32_t vi_largest(vi a)
{
    __m256i b = _mm256_max_epu32(a.low, a.high);
    __m128i c = _mm_max_epu32(_mm256_castsi256_si128(b), _mm256_extracti128_si256(b, 1));
    c = _mm_max_epu32(c, _mm_shuffle_epi32(c, 0x4e));
    return (uint32_t)_mm_cvtsi128_si32(_mm_max_epu32(c, _mm_shuffle_epi32(c, 0xb1)));
}

/* A group would take all 16 registers: it stays in the first-level cache, and several rows share each load. */
typedef struct { const uint8_t *bytes; int packed; } weight_group;
LANES_INLINE weight_group group_load(const uint8_t *bytes, int packed) { return (weight_group){bytes, packed}; }
/* Half a quad: the bytes of 8 lanes. */
LANES_INLINE __m256i group_half(weight_group w, int j, int half)
{
    __m256i stored = _mm256_loadu_si256((const void *)(w.bytes + 64 * (w.packed ? j % 4 : j) + 32 * half));
    if (!w.packed) return stored;
    if (j >= 4) stored = _mm256_srli_epi32(stored, 4);
    const __m256i levels = _mm256_broadcastsi128_si256(_mm_loadu_si128((const void *)q4_bytes));
    return _mm256_shuffle_epi8(levels, _mm256_and_si256(stored, _mm256_set1_epi8(15)));
}

LANES_INLINE __m256i broadcast_quad(const void *p)
{
    int32_t quad;
    memcpy(&quad, p, 4);
    return _mm256_set1_epi32(quad);
}

LANES_INLINE void group_dot(weight_group w, const int8_t *q, const uint8_t *correction, int n, vi *sum)
{
    _Pragma("GCC unroll 4") for (int r = 0; r < n; r++)
    {
#ifdef __AVXVNNI__
        sum[r].low = sum[r].high = broadcast_quad(correction + 4 * r);
#else
        sum[r].low = sum[r].high = _mm256_setzero_si256();
        (void)correction; /* the weights' 128 is taken off before */
#endif
    }
    _Pragma("GCC unroll 8") for (int j = 0; j < 8; j++) {
        __m256i low = group_half(w, j, 0), high = group_half(w, j, 1);
#ifdef __AVXVNNI__
        _Pragma("GCC unroll 4") for (int r = 0; r < n; r++) {
            __m256i quad = broadcast_quad(q + 32 * r + 4 * j);
            sum[r].low = _mm256_dpbusd_avx_epi32(sum[r].low, low, quad);
            sum[r].high = _mm256_dpbusd_avx_epi32(sum[r].high, high, quad);
        }
#else
        /* vpmaddubsw adds two products of an unsigned and a signed byte in 16 bits, saturating: 255 × 127 × 2 would not fit. So the weight's sign
         * goes to the activation, and 128 × 127 × 2 fits; 128 is the magnitude of the lowest weight, right as an unsigned byte. */
        const __m256i offset = _mm256_set1_epi8(-128), ones = _mm256_set1_epi16(1);
        low = _mm256_xor_si256(low, offset), high = _mm256_xor_si256(high, offset);
        __m256i low_magnitude = _mm256_abs_epi8(low), high_magnitude = _mm256_abs_epi8(high);
        _Pragma("GCC unroll 4") for (int r = 0; r < n; r++) {
            __m256i quad = broadcast_quad(q + 32 * r + 4 * j);
            __m256i low_pairs = _mm256_maddubs_epi16(low_magnitude, _mm256_sign_epi8(quad, low));
            __m256i high_pairs = _mm256_maddubs_epi16(high_magnitude, _mm256_sign_epi8(quad, high));
            sum[r].low = _mm256_add_epi32(sum[r].low, _mm256_madd_epi16(low_pairs, ones));
            sum[r].high = _mm256_add_epi32(sum[r].high, _mm256_madd_epi16(high_pairs, ones));
        }
#endif
    }
}

#endif
