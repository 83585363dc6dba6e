/* What runs in double, compiled once for all tables, and the floating-point control word. */
#include <math.h>
#include <stdint.h>
#include <string.h>

#include "kernels.h"

#if defined(__x86_64__) || defined(__i386__)
#include <xmmintrin.h>
#elif !defined(__aarch64__)
#include <fenv.h>
#endif

/*
 * Sine and cosine of a float. Reduction by π/2 (Cody & Waite) in four parts: the first three have 22, 22 and 22 bits at most, so that their
 * products with n < 2^31 are exact. Then the Taylor series on |r| ≤ π/4, whose first omitted terms are below 1e-17. Both results are wrong by
 * a few units of double; the caller rounds them to float.
 */
static void sine_cosine(float angle, double *sine, double *cosine)
{
    double x = angle;
    if (!(fabs(x) < 0x1p31)) { /* no position times frequency comes here; a NaN is found by the next norm */
        *sine = *cosine = NAN;
        return;
    }
    int64_t n = (int64_t)(x * 0x1.45f306dc9c883p-1 + (x < 0 ? -0.5 : 0.5));
    double m = (double)n;
    double r = ((x - m * 0x1.921fb0p+0) - m * 0x1.5110bp-22) - m * 0x1.1846980000000p-44 - m * 0x1.3198a2e037073p-69;
    double z = r * r;

    double s = -1.0 / 121645100408832000;
    s = s * z + 1.0 / 355687428096000;
    s = s * z - 1.0 / 1307674368000;
    s = s * z + 1.0 / 6227020800;
    s = s * z - 1.0 / 39916800;
    s = s * z + 1.0 / 362880;
    s = s * z - 1.0 / 5040;
    s = s * z + 1.0 / 120;
    s = s * z - 1.0 / 6;
    s = r + r * z * s;

    double c = -1.0 / 6402373705728000;
    c = c * z + 1.0 / 20922789888000;
    c = c * z - 1.0 / 87178291200;
    c = c * z + 1.0 / 479001600;
    c = c * z - 1.0 / 3628800;
    c = c * z + 1.0 / 40320;
    c = c * z - 1.0 / 720;
    c = c * z + 1.0 / 24;
    c = 1.0 - 0.5 * z + z * z * c;

    *sine = n & 1 ? c : s;
    *cosine = n & 1 ? s : c;
    if (n & 2) *sine = -*sine;
    if ((n + 1) & 2) *cosine = -*cosine;
}

void colibri_rope_angles(int32_t position, const float *inv_freq, size_t n_pairs, float factor, float *cosines, float *sines)
{
    for (size_t i = 0; i < n_pairs; i++) {
        double sine, cosine;
        sine_cosine((float)position * inv_freq[i], &sine, &cosine);
        cosines[i] = (float)cosine * factor; /* times 1 changes nothing */
        sines[i] = (float)sine * factor;
    }
}

/* x = 2^e m with m in [√½, √2); log m = 2 artanh s with s = (m − 1) / (m + 1), |s| < 0.172, by its series. */
double colibri_log(double x)
{
    if (!(x > 0) || x > 0x1.fffffffffffffp+1023) return x == 0 ? -INFINITY : x > 0 ? x : NAN;
    int e;
    double m = frexp(x, &e);
    if (m < 0.70710678118654752) m *= 2, e--;
    double s = (m - 1) / (m + 1), z = s * s, sum = 0;
    for (int i = 23; i >= 3; i -= 2) sum = (sum + 1.0 / i) * z;
    double log_m = 2 * s + 2 * s * sum;
    return e * 0x1.62e42fee00000p-1 + (e * 0x1.a39ef35793c76p-33 + log_m);
}

#if defined(__x86_64__) || defined(__i386__)

/* MXCSR: all exceptions masked, round to nearest, neither flush-to-zero nor denormals-are-zero. */
uint64_t colibri_fp_enter(void)
{
    uint64_t old = _mm_getcsr();
    _mm_setcsr(0x1f80);
    return old;
}
void colibri_fp_restore(uint64_t state) { _mm_setcsr((unsigned)state); }

#elif defined(__aarch64__)

/* FPCR zero: no traps, round to nearest, no flush-to-zero, no default NaN. */
uint64_t colibri_fp_enter(void)
{
    uint64_t old;
    __asm__ volatile("mrs %0, fpcr" : "=r"(old));
    __asm__ volatile("msr fpcr, %0" ::"r"((uint64_t)0) : "memory");
    return old;
}
void colibri_fp_restore(uint64_t state) { __asm__ volatile("msr fpcr, %0" ::"r"(state) : "memory"); }

#else

uint64_t colibri_fp_enter(void)
{
    int old = fegetround();
    fesetround(FE_TONEAREST);
    return (uint64_t)old;
}
void colibri_fp_restore(uint64_t state) { fesetround((int)state); }

#endif
